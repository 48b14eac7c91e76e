// In which order the ranks' values of an element are combined.
//
// gloo's ring all-reduce (gloo/allreduce.cc, as torch 2.11 to 2.13 have it) cuts the buffer into
// one *chunk* per rank. Chunk c starts at rank c-1, travels down the ring and ends at rank c:
// ((g[c-1] + g[c-2]) + ...) + g[c], indices modulo the number of ranks. Where chunks end follows
// from its *segments* of at most 1 MiB.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace ddpx::shm {

class ChunkOrder {
 public:
  ChunkOrder(Order order, int num_ranks, std::size_t count, std::size_t element_bytes);

  // The first element behind `element` that may be combined in another order.
  std::size_t run_end(std::size_t element) const;

  // Ranks in the order in which their values of `element` are combined.
  const std::vector<int>& ranks(std::size_t element) const;

  std::size_t chunk_elements() const {
    return chunk_elements_;
  }

 private:
  std::size_t chunk_elements_;
  std::vector<std::vector<int>> ranks_;  // per chunk
};

}  // namespace ddpx::shm
