// All-gather: each rank copies from the buffers or staging buffers of all other ranks.
#include <algorithm>

#include "collectives.h"

namespace ddpx::shm {
namespace {

std::byte* output_of(const Call& call, int index) {
  return call.outputs.empty() ? static_cast<std::byte*>(call.output) +
                                    static_cast<std::size_t>(index) * call.num_bytes()
                              : static_cast<std::byte*>(call.outputs[index]);
}

// Between two steps, each rank copies piece k of the other ranks out, then its own piece k+1 in.
void staged(Team& team, const Call& call) {
  const auto* input = static_cast<const std::byte*>(call.input);
  const auto num_bytes = call.num_bytes();
  const auto piece_bytes = team.piece_bytes();
  const auto length_at = [&](std::size_t begin) {
    return std::min(piece_bytes, num_bytes - begin);
  };
  const auto copy_in = [&](std::size_t begin, int half) {
    std::memcpy(team.input_area(team.own_index(), half), input + begin, length_at(begin));
  };
  int half = team.next_half();
  copy_in(0, half);
  for (std::size_t begin = 0; begin < num_bytes; begin += piece_bytes) {
    team.step();
    for (int index = 0; index < team.size(); ++index) {
      if (index != team.own_index()) {
        std::memcpy(output_of(call, index) + begin, team.input_area(index, half), length_at(begin));
      }
    }
    if (begin + piece_bytes < num_bytes) {
      half = team.next_half();
      copy_in(begin + piece_bytes, half);
    }
  }
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
    staged(team, call);
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
