#include "collectives.h"

namespace ddpx::shm {

bool fits_one_shot(const Team& team, const Call& call) {
  return team.size() > 1 && input_bytes(call, team.size()) <= team.one_shot_bytes();
}

void copy_to_one_shot(const Team& team, const Call& call, std::byte* one_shot) {
  const auto num_bytes = call.num_bytes();
  if (num_bytes == 0) {
    return;
  }
  switch (call.kind) {
    case Kind::kAllReduce:
    case Kind::kAllGather:
      std::memcpy(one_shot, call.input, num_bytes);
      return;
    case Kind::kBroadcast:
      if (call.root == team.own_index()) {
        std::memcpy(one_shot, call.output, num_bytes);
      }
      return;
    case Kind::kReduceScatter:
      for (std::size_t part = 0; part < call.inputs.size(); ++part) {
        std::memcpy(one_shot + part * num_bytes, call.inputs[part], num_bytes);
      }
      if (call.inputs.empty()) {
        std::memcpy(one_shot, call.input, input_bytes(call, team.size()));
      }
      return;
    case Kind::kBarrier:
      return;
  }
}

}  // namespace ddpx::shm
