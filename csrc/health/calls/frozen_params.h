// The params that a rank froze in its last steps, by wrapper, as the rank publishes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../machine/shared_text.h"

namespace ddpx::health {

using ParamIndices = std::vector<std::size_t>;

// Never 0. `params` ascend.
uint64_t digest_of(const ParamIndices& params);

// For error texts only, in memory that processes share: ranks compare the digests in StepCalls. A
// text that is too long has no params, and of many wrappers the last ones are kept. Zeroed at
// first. Threads that publish params of a wrapper take turns; any thread of any process reads.
class FrozenParams {
 public:
  // `params` ascend.
  void publish(uint32_t wrapper, uint64_t digest, const ParamIndices& params);

  // For ranks of other hosts.
  std::string to_text() const;

  // The params in a result of to_text(). nullopt if the text does not have them.
  static std::optional<ParamIndices> find(
      const std::string& text, uint32_t wrapper, uint64_t digest);

 private:
  std::array<SharedText<2048>, 4> texts_;  // by wrapper
};

}  // namespace ddpx::health
