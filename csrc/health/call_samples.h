// Steps that ranks of several machines compare with each other.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "page.h"

namespace ddpx::health {

// Machines tell each other of them through the store, twice a second. So that two of them find the
// same steps in what they keep, at any speed, it is the last few steps, and the last few of each 16
// and of each 256 steps of a wrapper. Thread-safe.
class CallSamples {
 public:
  // Of a step that all buckets have come back from.
  void add(const Trail& trail);

  std::string to_text() const;

  // Of the steps that are in another rank's text, too: the first for which calls differ, as this
  // rank and that one made them. What cannot be read is left out.
  std::optional<std::pair<Trail, Trail>> find_mismatch(
      const std::string& theirs, bool same_sequence) const;

 private:
  static constexpr std::size_t kNumLevels = 3;
  static constexpr uint32_t kFactor = 16;
  static constexpr std::size_t kNumKept = 8;  // of each level: at 1000 steps/s the last 2 s

  mutable std::mutex mutex_;
  std::array<std::deque<Trail>, kNumLevels> levels_;
};

}  // namespace ddpx::health
