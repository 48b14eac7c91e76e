// Broadcast: the other ranks copy from the root's buffer, if it is in shared memory, or else from
// the root's staging buffer, piece by piece.
#include "collectives.h"

namespace ddpx::shm {
namespace {

void broadcast_staged(Team& team, const Call& call) {
  const bool is_root = call.root == team.own_index();
  auto* data = static_cast<std::byte*>(call.output);
  copy_staged(
      team,
      call.num_bytes(),
      team.piece_bytes(),
      [&](std::size_t begin, std::size_t length, int half) {
        if (is_root) {
          std::memcpy(team.input_area(call.root, half), data + begin, length);
        }
      },
      [&](std::size_t begin, std::size_t length, int half) {
        if (!is_root) {
          std::memcpy(data + begin, team.input_area(call.root, half), length);
        }
      });
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
  } else if (team.resident_buffer(call.root) != nullptr) {
    if (!is_root) {
      std::memcpy(call.output, team.resident_buffer(call.root), call.num_bytes());
    }
    team.step();  // the root may change its buffer after this step
  } else {
    broadcast_staged(team, call);
  }
}

}  // namespace ddpx::shm
