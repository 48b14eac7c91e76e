// The order in which the ranks' values of an element are combined.
//
// gloo's ring all-reduce (gloo/allreduce.cc in torch 2.11 to 2.13) divides the buffer into one
// *chunk* per rank. The sum of chunk c begins at rank c-1, moves down the ring and ends at rank c:
// ((g[c-1] + g[c-2]) + ...) + g[c], with indices modulo the number of ranks. A chunk consists of
// whole *segments* of at most 1 MiB, which determines the ends of chunks.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace ddpx::shm {

// The order for all elements of one buffer. An immutable value.
class ChunkOrder {
 public:
  ChunkOrder(Order order, int num_ranks, std::size_t count, std::size_t element_bytes);

  // The first element after `element` that may have another order.
  std::size_t run_end(std::size_t element) const;

  // The ranks in the order in which their values of `element` are combined.
  const std::vector<int>& ranks(std::size_t element) const;

 private:
  std::size_t chunk_elements_;
  std::vector<std::vector<int>> ranks_;  // per chunk
};

}  // namespace ddpx::shm
