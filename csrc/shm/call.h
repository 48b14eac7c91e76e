// One rank's call of a collective operation.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "layout.h"
#include "types.h"

namespace ddpx::shm {

// The arguments of one call. The caller owns the buffers, and must keep them until the operation
// has ended. Inputs must be final when the call is submitted. `input == output` is allowed if both
// have the same size.
struct Call {
  Kind kind{};
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;           // a local rank; broadcast only
  std::size_t count = 0;  // number of elements, see below

  // operation       input                            output
  // all_reduce      count                            count
  // broadcast       `output` of the root: count      count
  // all_gather      count                            count per rank
  // reduce_scatter  count per rank                   count
  //
  // "count per rank" means `inputs` or `outputs`, indexed by local rank. If that list is empty, it
  // means the parts one after another in `input` or `output`.
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<const void*> inputs = {};
  std::vector<void*> outputs = {};

  // 0 means the timeout of the group. It counts from the start of the operation, not from `submit`.
  std::chrono::milliseconds timeout{0};

  std::size_t num_bytes() const {
    return count * size_of(dtype);
  }
};

// The size of one rank's whole input.
std::size_t input_bytes(const Call& call, int num_ranks);

Call all_reduce_call(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op);
Call broadcast_call(void* data, std::size_t count, DType dtype, int root);
Call all_gather_call(const void* input, void* output, std::size_t count, DType dtype);
Call reduce_scatter_call(
    const void* input, void* output, std::size_t count, DType dtype, ReduceOp op);
Call barrier_call();

// "all_reduce #5 (SUM of 100 float32)". `sequence` counts from 0.
std::string describe(const Descriptor& descriptor);

// Whether two ranks have called the same operation. The locations of their buffers may differ.
bool same_operation(const Descriptor& a, const Descriptor& b);

// Throws kMisuse if the call is invalid in a group of this size.
void check_call(const Call& call, int num_ranks);

}  // namespace ddpx::shm
