// Broadcast: the other ranks copy from the root's buffer, if it is in shared memory, or else from
// the root's staging buffer, piece by piece.
#include <algorithm>

#include "collectives.h"

namespace ddpx::shm {
namespace {

// The root copies piece k+1 in while the other ranks copy piece k out.
void staged(Team& team, const Call& call) {
  const bool is_root = call.root == team.own_index();
  auto* data = static_cast<std::byte*>(call.output);
  const auto num_bytes = call.num_bytes();
  const auto piece_bytes = team.piece_bytes();
  const auto length_at = [&](std::size_t begin) {
    return std::min(piece_bytes, num_bytes - begin);
  };
  const auto copy_in = [&](std::size_t begin, int half) {
    if (is_root) {
      std::memcpy(team.input_area(call.root, half), data + begin, length_at(begin));
    }
  };
  int half = team.next_half();
  copy_in(0, half);
  for (std::size_t begin = 0; begin < num_bytes; begin += piece_bytes) {
    team.step();
    if (!is_root) {
      std::memcpy(data + begin, team.input_area(call.root, half), length_at(begin));
    }
    if (begin + piece_bytes < num_bytes) {
      half = team.next_half();
      copy_in(begin + piece_bytes, half);
    }
  }
}

}  // namespace

void broadcast(Team& team, const Call& call) {
  if (call.count == 0 || team.size() == 1) {
    return;
  }
  const bool is_root = call.root == team.own_index();
  if (fits_one_shot(team, call)) {
    if (!is_root) {
      std::memcpy(call.output, team.one_shot(call.root), call.num_bytes());
    }
  } else if (team.resident(call.root)) {
    if (!is_root) {
      std::memcpy(call.output, team.resident_buffer(call.root), call.num_bytes());
    }
    team.step();  // the root may change its buffer after this step
  } else {
    staged(team, call);
  }
}

}  // namespace ddpx::shm
