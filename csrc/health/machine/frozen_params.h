// The params that a rank froze in its last steps, as published to its peers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared_text.h"

namespace ddpx::health {

using ParamIndices = std::vector<std::size_t>;

// Never 0. `params` ascend.
uint64_t digest_of(const ParamIndices& params);

// For error texts only, in memory that processes share: ranks compare the digests in StepCalls. Too
// many params are left out, and of many wrappers the last ones are kept. Zeroed at first. Only
// one thread at a time may publish params of a wrapper. Any thread of any process may read.
class FrozenParams {
 public:
  // `params` ascend.
  void publish(uint32_t wrapper, uint64_t digest, const ParamIndices& params);

  // The params of all wrappers, for ranks of other hosts.
  std::string encode_all() const;

  // The params in a result of encode_all(). nullopt if the params are not in it.
  static std::optional<ParamIndices> find(std::string_view all, uint32_t wrapper, uint64_t digest);

 private:
  std::array<SharedText<4096>, 4> places_;  // by wrapper
};

}  // namespace ddpx::health
