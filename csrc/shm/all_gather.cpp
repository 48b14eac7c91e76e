// All-gather: each rank copies from the buffers or staging buffers of all other ranks.
#include "collectives.h"

namespace ddpx::shm {
namespace {

std::byte* output_of(const Call& call, int index) {
  return call.outputs.empty() ? static_cast<std::byte*>(call.output) +
                                    static_cast<std::size_t>(index) * call.num_bytes()
                              : static_cast<std::byte*>(call.outputs[index]);
}

void gather_staged(Team& team, const Call& call) {
  const auto* input = static_cast<const std::byte*>(call.input);
  copy_staged(
      team,
      call.num_bytes(),
      team.piece_bytes(),
      [&](std::size_t begin, std::size_t length, int half) {
        std::memcpy(team.input_area(team.own_index(), half), input + begin, length);
      },
      [&](std::size_t begin, std::size_t length, int half) {
        for (int index = 0; index < team.size(); ++index) {
          if (index != team.own_index()) {
            std::memcpy(output_of(call, index) + begin, team.input_area(index, half), length);
          }
        }
      });
}

}  // namespace

void all_gather(Team& team, const Call& call) {
  if (call.count == 0) {
    return;
  }
  const bool fits = fits_one_shot(team, call);
  if (fits || team.all_resident()) {
    for (int index = 0; index < team.size(); ++index) {
      if (index != team.own_index()) {
        const auto* source = fits ? team.one_shot(index) : team.resident_buffer(index);
        std::memcpy(output_of(call, index), source, call.num_bytes());
      }
    }
  } else if (team.size() > 1) {
    gather_staged(team, call);
  }
  auto* own = output_of(call, team.own_index());
  if (own != call.input) {
    std::memcpy(own, call.input, call.num_bytes());
  }
  if (!fits && team.all_resident()) {
    team.step();
  }
}

}  // namespace ddpx::shm
