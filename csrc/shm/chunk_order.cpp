#include "chunk_order.h"

#include <algorithm>
#include <limits>

#include "../os/memory.h"

namespace ddpx::shm {
namespace {

constexpr std::size_t kGlooMaxSegmentBytes = std::size_t{1} << 20;

std::size_t gloo_chunk_elements(int num_ranks, std::size_t count, std::size_t element_bytes) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const auto num_bytes = count * element_bytes;
  const auto full_segments = (num_bytes + kGlooMaxSegmentBytes - 1) / kGlooMaxSegmentBytes;
  const auto num_segments = os::round_up(std::max(full_segments, 2 * ranks), ranks);
  const auto segment_bytes =
      os::round_up((num_bytes + num_segments - 1) / num_segments, element_bytes);
  return num_segments / ranks * segment_bytes / element_bytes;
}

}  // namespace

ChunkOrder::ChunkOrder(Order order, int num_ranks, std::size_t count, std::size_t element_bytes) {
  if (order == Order::kFixed || count == 0) {
    chunk_elements_ = std::numeric_limits<std::size_t>::max();
    auto& ranks = ranks_.emplace_back();
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.push_back(rank);
    }
    return;
  }
  chunk_elements_ = gloo_chunk_elements(num_ranks, count, element_bytes);
  for (int chunk = 0; chunk < num_ranks; ++chunk) {
    auto& ranks = ranks_.emplace_back();
    for (int hop = 1; hop <= num_ranks; ++hop) {
      ranks.push_back((chunk - hop + num_ranks) % num_ranks);
    }
  }
}

std::size_t ChunkOrder::run_end(std::size_t element) const {
  const auto chunk = element / chunk_elements_;
  return chunk + 1 >= ranks_.size() ? std::numeric_limits<std::size_t>::max()
                                    : (chunk + 1) * chunk_elements_;
}

const std::vector<int>& ChunkOrder::ranks(std::size_t element) const {
  return ranks_[std::min(element / chunk_elements_, ranks_.size() - 1)];
}

}  // namespace ddpx::shm
