// Reduces ranges of a buffer over all ranks, in the order of ranks that each element requires.
#pragma once

#include <vector>

#include "chunk_order.h"
#include "kernels.h"

namespace ddpx::shm {

// The reduction of one operation. Lives on the stack of the algorithm; one thread uses it.
class RangeReducer {
 public:
  // `count` is the number of elements in the whole buffer.
  RangeReducer(Order order, DType dtype, ReduceOp op, int num_ranks, std::size_t count);

  std::size_t element_bytes() const {
    return element_bytes_;
  }

  // Reduces elements [begin, end). `sources[rank]` is the address of element `begin` of that rank.
  // Each of `results` receives the same values, and may be one of `sources`.
  void reduce(
      std::size_t begin,
      std::size_t end,
      const std::vector<const std::byte*>& sources,
      const std::vector<std::byte*>& results);

 private:
  ChunkOrder order_;
  Kernel kernel_;
  std::size_t element_bytes_;
  int num_ranks_;
  std::vector<const std::byte*> ordered_sources_;
  std::vector<std::byte*> run_results_;
};

}  // namespace ddpx::shm
