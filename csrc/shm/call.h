// One call of a collective operation, as one rank makes it.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "layout.h"
#include "types.h"

namespace ddpx::shm {

// Buffers belong to the caller and must stay until the operation has ended. Inputs must be final
// when the call is submitted. `input == output` is allowed wherever the sizes are the same.
struct Call {
  Kind kind{};
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;           // local rank; broadcast only
  std::size_t count = 0;  // elements; see below

  // all_reduce      count in, count out
  // broadcast       count, `output`: read on the root, written elsewhere
  // all_gather      count in, count per rank out: into `outputs` by local rank, or else one
  //                 after another into `output`
  // reduce_scatter  count per rank in: from `inputs` by local rank, or else one after another
  //                 from `input`; count out
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;

  // 0: the group's. Counted from when the operation is begun, not from when it was submitted.
  std::chrono::milliseconds timeout{0};

  std::size_t num_bytes() const {
    return count * size_of(dtype);
  }
};

Call all_reduce_call(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op);
Call broadcast_call(void* data, std::size_t count, DType dtype, int root);
Call all_gather_call(const void* input, void* output, std::size_t count, DType dtype);
Call reduce_scatter_call(
    const void* input, void* output, std::size_t count, DType dtype, ReduceOp op);
Call barrier_call();

// "all_reduce #5 (SUM of 100 float32)". `sequence` counts from 0.
std::string describe(const Descriptor& descriptor);

// Whether two ranks mean the same operation. Where their buffers lie may differ.
bool same_operation(const Descriptor& a, const Descriptor& b);

// Throws kMisuse if no group of ranks could carry it out.
void check_call(const Call& call, int num_ranks);

}  // namespace ddpx::shm
