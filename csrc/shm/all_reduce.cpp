// All-reduce by one of three algorithms.
//
// One-shot    small buffers: each rank copies its input with the first step, and each rank reduces
//             all elements itself.
// Resident    buffers in shared memory: rank i owns slice i. It reduces the slice over all buffers
//             and writes the result into all of them. Each cache line is read and written once.
// Staged      private buffers: the same, piece by piece through staging buffers that stay in the
//             cache. A rank reads and writes its own slice in place, without staging.
//
// The resident algorithm is that of DeepSpeed's CPU inference (shared-memory all-reduce), without
// its staging copies.
#include <algorithm>

#include "../os/memory.h"
#include "collectives.h"
#include "range_reducer.h"

namespace ddpx::shm {
namespace {

struct Range {
  std::size_t begin;
  std::size_t end;

  std::size_t size() const {
    return end - begin;
  }
};

// The part of [begin, end) that local rank `index` owns. Slices end at cache lines, so that no two
// ranks write to the same line.
Range slice(
    std::size_t begin, std::size_t end, int index, int num_ranks, std::size_t element_bytes) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const auto share = os::round_up((end - begin + ranks - 1) / ranks, kLine / element_bytes);
  const auto first = std::min(begin + static_cast<std::size_t>(index) * share, end);
  return {first, std::min(first + share, end)};
}

void one_shot(Team& team, const Call& call, RangeReducer& reducer) {
  const auto sources =
      sources_by_rank(team, static_cast<const std::byte*>(call.input), [&](int index) {
        return team.one_shot(index);
      });
  reducer.reduce(0, call.count, sources, {static_cast<std::byte*>(call.output)});
}

void resident(Team& team, const Call& call, RangeReducer& reducer) {
  const auto own = slice(0, call.count, team.own_index(), team.size(), reducer.element_bytes());
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> results;
  for (int index = 0; index < team.size(); ++index) {
    auto* buffer = index == team.own_index() ? static_cast<std::byte*>(call.output)
                                             : team.resident_buffer(index);
    sources.push_back(buffer + own.begin * reducer.element_bytes());
    results.push_back(buffer + own.begin * reducer.element_bytes());
  }
  reducer.reduce(own.begin, own.end, sources, results);
  team.step();
}

// The staged algorithm. Lives on the stack of all_reduce(); one thread uses it.
class Staged {
 public:
  Staged(Team& team, const Call& call, RangeReducer& reducer)
      : team_(team),
        reducer_(reducer),
        element_bytes_(reducer.element_bytes()),
        count_(call.count),
        piece_elements_(largest_piece()),
        input_(static_cast<const std::byte*>(call.input)),
        output_(static_cast<std::byte*>(call.output)) {}

  // Between two steps a rank works on three pieces, so that each piece needs only one step. It
  // copies piece k-1 out, reduces its slice of piece k, and copies piece k+1 in.
  void run() {
    int half = team_.next_half();
    copy_in(0, half);
    std::size_t begin = 0;
    std::size_t last_begin = 0;
    int last_half = half;
    for (; begin < count_; begin += piece_elements_) {
      team_.step();
      if (begin > 0) {
        copy_out(last_begin, last_half);
      }
      reduce_slice(begin, half);
      last_begin = begin;
      last_half = half;
      if (begin + piece_elements_ < count_) {
        half = team_.next_half();
        copy_in(begin + piece_elements_, half);
      }
    }
    team_.step();
    copy_out(last_begin, last_half);
  }

 private:
  // A slice is its share of the piece, rounded up to cache lines. All slices must fit into the
  // result areas.
  std::size_t largest_piece() const {
    const auto ranks = static_cast<std::size_t>(team_.size());
    const auto per_line = kLine / element_bytes_;
    const auto limit = std::min(team_.piece_bytes(), team_.result_bytes() * ranks) / element_bytes_;
    return limit / (ranks * per_line) * ranks * per_line;
  }

  std::size_t end_of(std::size_t begin) const {
    return std::min(begin + piece_elements_, count_);
  }

  Range slice_of(std::size_t begin, int index) const {
    return slice(begin, end_of(begin), index, team_.size(), element_bytes_);
  }

  void copy_in(std::size_t begin, int half) {
    auto* area = team_.input_area(team_.own_index(), half);
    const auto own = slice_of(begin, team_.own_index());
    const auto copy = [&](std::size_t from, std::size_t to) {
      std::memcpy(
          area + (from - begin) * element_bytes_,
          input_ + from * element_bytes_,
          (to - from) * element_bytes_);
    };
    copy(begin, own.begin);
    copy(own.end, end_of(begin));
  }

  void reduce_slice(std::size_t begin, int half) {
    const auto own = slice_of(begin, team_.own_index());
    const auto sources =
        sources_by_rank(team_, input_ + own.begin * element_bytes_, [&](int index) {
          return team_.input_area(index, half) + (own.begin - begin) * element_bytes_;
        });
    auto* result = team_.result_area(team_.own_index(), half);
    reducer_.reduce(own.begin, own.end, sources, {output_ + own.begin * element_bytes_, result});
  }

  void copy_out(std::size_t begin, int half) {
    for (int index = 0; index < team_.size(); ++index) {
      const auto range = slice_of(begin, index);
      if (index != team_.own_index() && range.size() > 0) {
        std::memcpy(
            output_ + range.begin * element_bytes_,
            team_.result_area(index, half),
            range.size() * element_bytes_);
      }
    }
  }

  Team& team_;
  RangeReducer& reducer_;
  std::size_t element_bytes_;
  std::size_t count_;
  std::size_t piece_elements_;
  const std::byte* input_;
  std::byte* output_;
};

}  // namespace

void all_reduce(Team& team, const Call& call) {
  if (call.count == 0) {
    return;
  }
  if (team.size() == 1) {
    std::memmove(call.output, call.input, call.num_bytes());
    return;
  }
  RangeReducer reducer(team.order(), call.dtype, call.op, team.size(), call.count);
  if (fits_one_shot(team, call)) {
    one_shot(team, call, reducer);
  } else if (team.all_resident()) {
    resident(team, call, reducer);
  } else {
    Staged(team, call, reducer).run();
  }
}

}  // namespace ddpx::shm
