#include "frozen_params.h"

#include <algorithm>

#include "record.h"

namespace ddpx::health {

uint64_t digest_of(const ParamIndices& params) {
  uint64_t digest = 0x9e3779b97f4a7c15;
  for (const auto param : params) {
    digest = (digest ^ (param + 1)) * 0xff51afd7ed558ccd;
    digest ^= digest >> 32;
  }
  return std::max<uint64_t>(digest, 1);
}

void FrozenParams::publish(uint32_t wrapper, uint64_t digest, const ParamIndices& params) {
  auto& place = places_[wrapper % places_.size()];
  const auto record = encode(wrapper, digest, to_runs(params));
  place.write(record.size() <= place.kMostBytes ? record : std::string());
}

std::string FrozenParams::encode_all() const {
  std::string all;
  for (const auto& place : places_) {
    all += place.read();
  }
  return all;
}

std::optional<ParamIndices> FrozenParams::find(
    std::string_view all, uint32_t wrapper, uint64_t digest) {
  constexpr uint32_t kMostParams = 1 << 20;
  if (digest == digest_of({})) {
    return ParamIndices();
  }
  uint32_t its_wrapper = 0;
  uint64_t its_digest = 0;
  std::vector<Run> runs;
  while (decode(all, its_wrapper, its_digest, runs)) {
    if (its_wrapper == wrapper && its_digest == digest) {
      return from_runs<std::size_t>(runs, kMostParams);
    }
  }
  return std::nullopt;
}

}  // namespace ddpx::health
