// What is reduced, and how: the transport's own names, as it knows nothing of torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpx::shm {

// Complex tensors are passed as twice as many reals, as torch passes them to gloo.
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
  kBool,  // bytes of 0 or 1, and they stay so: SUM is "or", PRODUCT is "and"
};

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,  // SUM, then divided by the number of ranks; floating point only
  kMin,
  kMax,
  kProduct,
  kBitAnd,  // integers and bool only, as the next two
  kBitOr,
  kBitXor,
};

// In which order the ranks' values of one element are combined.
enum class Order : uint8_t {
  kGloo,   // as gloo's ring does it: depends on where in the buffer the element lies
  kFixed,  // rank 0, 1, 2, ... for every element: independent of buffer size and layout
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
