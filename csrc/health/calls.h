// Compares the collective calls that ranks made in a step.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "page.h"

namespace ddpx::health {

// Whether two ranks may have made the same collective calls in a step. The calls of a rank are not
// known in full if the rank has not finished the step, has no results, or raised in the step.
// `same_sequence`: ranks whose calls are the same have the same StepCalls::sequence.
bool same_calls(const StepCalls& a, const StepCalls& b, bool same_sequence);

// Describes how the calls of ranks differ, in the step of the first calls.
std::string describe_mismatch(const std::vector<std::pair<int, StepCalls>>& ranks);

// Steps that hosts compare with each other: the last few steps of each wrapper, and the last few of
// each 16, 256 and 4096 steps. So two hosts have steps in common at any speed, though a host hears
// of another one only every second. Thread-safe.
class CallSamples {
 public:
  // Adds a step whose buckets have all been reduced.
  void add(const StepCalls& calls);

  std::string to_text() const;

  // The first step for which this rank's calls differ from those in another rank's text, as this
  // rank and the other one made them. Malformed text is ignored.
  std::optional<std::pair<StepCalls, StepCalls>> find_mismatch(
      const std::string& theirs, bool same_sequence) const;

 private:
  static constexpr std::size_t kNumLevels = 4;
  static constexpr uint32_t kFactor = 16;
  static constexpr std::size_t kNumKept = 8;  // of each level

  mutable std::mutex mutex_;
  std::array<std::deque<StepCalls>, kNumLevels> levels_;
};

}  // namespace ddpx::health
