// The transport's own enums of dtypes, reductions and operations, since it does not include torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpx::shm {

// A complex tensor is passed as a tensor of twice as many reals, as torch does for gloo.
enum class DType : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kUint8,
  kInt16,
  kInt32,
  kInt64,
  kBool,  // bytes of 0 or 1; results are 0 or 1, too: SUM is "or", PRODUCT is "and"
};

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,  // SUM divided by the number of ranks; floating point only
  kMin,
  kMax,
  kProduct,
  kBitAnd,  // the three bitwise ops are for integers and bool only
  kBitOr,
  kBitXor,
};

// The order in which the ranks' values of one element are combined.
enum class Order : uint8_t {
  kGloo,   // the order of gloo's ring, which depends on the element's position in the buffer
  kFixed,  // rank 0, 1, 2, ... for every element, whatever the size and layout of the buffer
};

enum class Kind : uint8_t {
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kBarrier,
};

std::size_t size_of(DType dtype);

const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
const char* name_of(Order order);
const char* name_of(Kind kind);

}  // namespace ddpx::shm
