#include "types.h"

namespace ddpx::shm {
namespace {

// The values come from other ranks, so they may be unknown.
template <class Entry, std::size_t N, class Enum>
const Entry& entry_of(const Entry (&entries)[N], Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return entries[index < N - 1 ? index : N - 1];
}

// In the order of the enums. The last entry stands for unknown values.
constexpr struct {
  const char* name;
  std::size_t num_bytes;
} kDTypes[] = {
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"int8", 1},
    {"uint8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"bool", 1},
    {"unknown dtype", 0}};
constexpr const char* kReduceOps[] = {
    "SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "unknown op"};
constexpr const char* kOrders[] = {"gloo", "fixed", "unknown order"};
constexpr const char* kKinds[] = {
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "unknown operation"};

}  // namespace

std::size_t size_of(DType dtype) {
  return entry_of(kDTypes, dtype).num_bytes;
}

const char* name_of(DType dtype) {
  return entry_of(kDTypes, dtype).name;
}

const char* name_of(ReduceOp op) {
  return entry_of(kReduceOps, op);
}

const char* name_of(Order order) {
  return entry_of(kOrders, order);
}

const char* name_of(Kind kind) {
  return entry_of(kKinds, kind);
}

}  // namespace ddpx::shm
