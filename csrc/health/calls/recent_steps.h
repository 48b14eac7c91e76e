// The collective calls that a rank made in its last steps, as the rank publishes them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace ddpx::health {

// The buckets that a rank has launched in one step of one wrapper.
struct StepCalls {
  uint32_t wrapper = 0;  // its number; see kFirstOther
  uint32_t step = 0;
  uint64_t num_launched = 0;
  uint64_t digest = 0;     // of the sizes and dtypes of all buckets so far, and of `sequence` if
                           // ranks with the same calls have the same one
  uint64_t sequence = 0;   // of the group's calls, at the first launch; 0: not counted
  uint64_t results = 0;    // a sample of what the buckets came back with; 0 until the step's end
  uint64_t num_bytes = 0;  // of all buckets so far
  uint64_t frozen = 0;     // a digest of the params that this rank froze and that its peers must
                           // freeze, too; 0 if they need not

  // In place of results: of a rank that has found something wrong with its own gradients. It may
  // have written into a bucket in flight: ranks that did nothing wrong can differ by it, too.
  static constexpr uint64_t kSpoiled = 1;
  // And of one that has none to compare, as with a communication hook, or on a device.
  static constexpr uint64_t kNone = 2;

  bool has_results() const {
    return results > kNone;
  }
  // Whether two ranks may have launched the same. Unknown if one of them has launched more.
  bool same_launches(const StepCalls& other) const {
    return num_launched != other.num_launched || digest == other.digest;
  }
  // Whether two ranks may have frozen the same params.
  bool same_frozen(const StepCalls& other) const {
    return frozen == 0 || other.frozen == 0 || frozen == other.frozen;
  }
  // Whether two ranks may have received the same.
  bool same_results(const StepCalls& other) const {
    return !has_results() || !other.has_results() || results == other.results;
  }
};

// The last steps of a rank, in memory that processes share: the last 15 steps, and the last 15 of
// each 16 and of each 256 steps. Ranks of a host compare the steps that they take at the same time.
// Hosts hear of each other only every second, and so have steps in common at any speed. Zeroed at
// first. Threads that publish steps of a wrapper take turns; any thread of any process reads.
class RecentSteps {
 public:
  void publish(const StepCalls& calls);

  // nullopt if the step has left the memory, or has not started.
  std::optional<StepCalls> find(uint8_t model, uint32_t step) const;
  // The same step of the same wrapper.
  std::optional<StepCalls> find(const StepCalls& other) const;

  // The steps whose buckets have all been reduced, for ranks of other hosts.
  std::string to_text() const;

  // The first step for which these calls differ from those in another rank's text, as this rank and
  // the other one made them. Malformed text is ignored.
  std::optional<std::pair<StepCalls, StepCalls>> find_mismatch(const std::string& theirs) const;

 private:
  // A sequence lock: `version` is odd while the owner writes.
  struct Entry {
    std::atomic<uint64_t> version;
    std::array<std::atomic<uint64_t>, sizeof(StepCalls) / sizeof(uint64_t)> words;

    std::optional<StepCalls> read() const;
  };
  static constexpr std::size_t kNumLevels = 3;
  static constexpr std::size_t kFactor = 16;

  static std::size_t place_of(uint8_t model, uint32_t step);

  std::array<Entry, kNumLevels * kFactor> entries_;
};

}  // namespace ddpx::health
