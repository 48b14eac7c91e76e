// Reduces ranges of a buffer that every rank has, each element in the right order of ranks.
#pragma once

#include <vector>

#include "chunk_order.h"
#include "kernels.h"

namespace ddpx::shm {

class RangeReducer {
 public:
  // `count` elements in the whole buffer, of which ranges will be reduced.
  RangeReducer(Order order, DType dtype, ReduceOp op, int num_ranks, std::size_t count);

  std::size_t element_bytes() const {
    return element_bytes_;
  }

  // Elements [begin, end). `sources` has, by rank, where element `begin` lies; all `results` get
  // what comes out, and may be the sources.
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
