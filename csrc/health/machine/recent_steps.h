// The collective calls of a rank in its last steps, as published to its peers.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace ddpx::health {

// The buckets that a rank has launched in one step of one wrapper.
struct StepCalls {
  uint32_t wrapper = 0;  // the number of the wrapper; see kFirstOther
  uint32_t step = 0;
  uint64_t num_launched = 0;
  uint64_t digest = 0;     // of the sizes and dtypes of all buckets so far, and of `sequence` if
                           // ranks with the same calls have the same `sequence`
  uint64_t sequence = 0;   // the number of the first launch among the group's calls; 0: not counted
  uint64_t results = 0;    // a sample of the reduced buckets; 0 until the end of the step
  uint64_t num_bytes = 0;  // of all buckets so far
  uint64_t frozen = 0;     // a digest of the params that this rank froze; 0 if its peers may freeze
                           // other params
  uint64_t settings = 0;   // kKnown and further flags; 0 if unknown

  // Flags of `settings`. A flag that differs between ranks makes their collective calls different.
  static constexpr uint64_t kKnown = 1;
  static constexpr uint64_t kHasHook = 2;  // a communication hook, in place of a sum in memory
  static constexpr uint64_t kIsStatic = 4;
  static constexpr uint64_t kChecksFinite = 8;

  // The value of `results` if the gradients of this rank are wrong. The rank may have written into
  // a bucket in flight, so results of other ranks may differ, too.
  static constexpr uint64_t kSpoiled = 1;
  // The value of `results` if there is nothing to compare: with a communication hook, or on a
  // device.
  static constexpr uint64_t kNone = 2;

  bool has_results() const {
    return results > kNone;
  }
  // Whether two ranks may have launched the same buckets. True if one rank has launched more.
  bool same_launches(const StepCalls& other) const {
    return num_launched != other.num_launched || digest == other.digest;
  }
  // Whether two ranks may have frozen the same params.
  bool same_frozen(const StepCalls& other) const {
    return frozen == 0 || other.frozen == 0 || frozen == other.frozen;
  }
  // Whether two ranks may have received the same results.
  bool same_results(const StepCalls& other) const {
    return !has_results() || !other.has_results() || results == other.results;
  }
};

// The last steps of a rank, in memory that processes share: the last 15 steps, and the last 15 of
// each 16 and of each 256 steps. Ranks of a host compare their current steps. Hosts exchange
// messages only every second, and have steps in common at any speed. Zeroed at first. Only one
// thread at a time may publish steps of a wrapper. Wrappers may publish at the same time. Any
// thread of any process may read.
class RecentSteps {
 public:
  // Has no effect while another wrapper publishes in the same place: this step is not compared.
  void publish(const StepCalls& calls);

  // nullopt if the step is no longer in memory, or has not started.
  std::optional<StepCalls> find(uint8_t model, uint32_t step) const;
  // Finds the same step of the same wrapper.
  std::optional<StepCalls> find(const StepCalls& other) const;

  // The steps whose buckets have all been reduced, for ranks of other hosts.
  std::vector<StepCalls> reduced() const;

  // The first step for which these calls differ from the calls of another rank, as this rank and
  // the other rank made them.
  std::optional<std::pair<StepCalls, StepCalls>> find_mismatch(
      const std::vector<StepCalls>& theirs) const;

 private:
  // A sequence lock: `version` is odd while a thread of the owner writes.
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
