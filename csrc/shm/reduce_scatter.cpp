// Reduce-scatter: each rank reduces its own part over the inputs of all ranks. The order of
// summation is that of an all-reduce, as in gloo: an all-reduce of the whole input, or of each part
// if the parts are separate buffers.
#include "collectives.h"
#include "range_reducer.h"

namespace ddpx::shm {
namespace {

// One reduce-scatter. Lives on the stack of reduce_scatter(); one thread uses it.
class ReduceScatter {
 public:
  ReduceScatter(Team& team, const Call& call)
      : team_(team),
        call_(call),
        reducer_(
            team.order(),
            call.dtype,
            call.op,
            team.size(),
            call.inputs.empty() ? call.count * static_cast<std::size_t>(team.size()) : call.count),
        element_bytes_(size_of(call.dtype)) {}

  // Reads memory in which the parts of a rank's input follow each other.
  template <class WholeInput>
  void direct(const WholeInput& whole_input) {
    const auto sources = sources_by_rank(team_, part(team_.own_index()), [&](int index) {
      return whole_input(index) + static_cast<std::size_t>(team_.own_index()) * call_.num_bytes();
    });
    reduce(0, call_.count, sources);
  }

  void staged() {
    const auto ranks = static_cast<std::size_t>(team_.size());
    const auto share_bytes = team_.piece_bytes() / ranks / kLine * kLine;
    const auto share = share_bytes / element_bytes_;
    const auto copy_in = [&](std::size_t begin, std::size_t length, int half) {
      auto* area = team_.input_area(team_.own_index(), half);
      for (int target = 0; target < team_.size(); ++target) {
        if (target != team_.own_index()) {
          std::memcpy(
              area + static_cast<std::size_t>(target) * share_bytes,
              part(target) + begin * element_bytes_,
              length * element_bytes_);
        }
      }
    };
    copy_staged(
        team_, call_.count, share, copy_in, [&](std::size_t begin, std::size_t length, int half) {
          const auto* own = part(team_.own_index()) + begin * element_bytes_;
          const auto sources = sources_by_rank(team_, own, [&](int index) {
            return team_.input_area(index, half) +
                   static_cast<std::size_t>(team_.own_index()) * share_bytes;
          });
          reduce(begin, begin + length, sources);
        });
  }

 private:
  // The input of this rank for a target rank.
  const std::byte* part(int target) const {
    return call_.inputs.empty() ? static_cast<const std::byte*>(call_.input) +
                                      static_cast<std::size_t>(target) * call_.num_bytes()
                                : static_cast<const std::byte*>(call_.inputs[target]);
  }

  // Reduces elements [begin, end) of this rank's part.
  void reduce(std::size_t begin, std::size_t end, const std::vector<const std::byte*>& sources) {
    const auto first =
        call_.inputs.empty() ? static_cast<std::size_t>(team_.own_index()) * call_.count : 0;
    reducer_.reduce(
        first + begin,
        first + end,
        sources,
        {static_cast<std::byte*>(call_.output) + begin * element_bytes_});
  }

  Team& team_;
  const Call& call_;
  RangeReducer reducer_;
  std::size_t element_bytes_;
};

}  // namespace

void reduce_scatter(Team& team, const Call& call) {
  if (call.count == 0) {
    return;
  }
  if (team.size() == 1) {
    const auto* input = call.inputs.empty() ? call.input : call.inputs[0];
    std::memmove(call.output, input, call.num_bytes());
    return;
  }
  ReduceScatter operation(team, call);
  if (fits_one_shot(team, call)) {
    operation.direct([&](int index) { return team.one_shot(index); });
  } else if (team.all_resident()) {
    operation.direct([&](int index) { return team.resident_buffer(index); });
    team.step();
  } else {
    operation.staged();
  }
}

}  // namespace ddpx::shm
