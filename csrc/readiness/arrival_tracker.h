// When the gradient of a param is final in a backward, and which params are missing at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../buckets/bucket_plan.h"

namespace ddpx {

enum class Arrival {
  kFinal,       // nothing more will be added to this gradient in this backward
  kPartial,     // another part may arrive, so the gradient must not be packed yet
  kRepeated,    // the gradient was final before: what was packed is wrong now
  kFrozen,      // the param was frozen when the step began: no bucket waits for its gradient
  kUnforeseen,  // the param was unused when the step began, and was packed as unused
};

class ArrivalTracker;

// The number of parts of each gradient in the steps so far. A layer in several reentrant
// checkpoints gets its gradient in several parts. The number of parts is learned: in the first step
// no gradient is final before the end of backward. Later a gradient is final when as many parts
// have arrived as ever did in one step. In a static graph the first step alone counts.
//
// The reducer owns the history, under its mutex.
class ArrivalHistory {
 public:
  ArrivalHistory(std::size_t num_params, GraphMode mode) : num_params_(num_params), mode_(mode) {}

  // True until the first step has ended.
  bool learning() const {
    return expected_.empty();
  }

  // Params that the static graph never reaches; empty in the other modes and while learning.
  const std::vector<std::size_t>& known_unused() const {
    return known_unused_;
  }

  // Whether all steps so far brought the same number of parts of every gradient.
  bool always_the_same() const {
    return always_the_same_;
  }

  // The step of `arrivals` came to its end.
  void learn(const ArrivalTracker& arrivals);

 private:
  friend class ArrivalTracker;

  std::size_t num_params_;
  GraphMode mode_;
  std::vector<uint32_t> expected_;  // per param, once learned
  std::vector<std::size_t> known_unused_;
  std::vector<uint32_t> last_arrived_;  // per param, in the last step
  bool always_the_same_ = true;
};

// The gradients that arrived in one step. The step owns the tracker, under the mutex of the
// reducer.
class ArrivalTracker {
 public:
  // A backward begins that waits neither for the `frozen` nor for the `unused` params. While the
  // history is learning, the backward waits for unused params, too. `history` must outlive the
  // tracker.
  explicit ArrivalTracker(
      const ArrivalHistory& history,
      const std::vector<std::size_t>& frozen = {},
      const std::vector<std::size_t>& unused = {});

  Arrival arrive(std::size_t param_index);

  // Params that are still waited for, in index order.
  std::vector<std::size_t> unfinished() const;

  // The unfinished params that are wrong as they stand: no part arrived or, in a static graph, too
  // few parts arrived.
  std::vector<std::size_t> missing() const;

  // Whether any part of the param's gradient arrived.
  bool arrived(std::size_t param_index) const {
    return arrived_[param_index] > 0;
  }

  // Params that this backward does not wait for because they are unused, in index order.
  std::vector<std::size_t> unused() const;

 private:
  friend class ArrivalHistory;
  enum class Expectation : uint8_t { kGradient, kFrozen, kUnused };

  // Number of parts that make the gradient final in this backward.
  uint32_t awaited(std::size_t param_index) const;

  const ArrivalHistory& history_;
  std::vector<uint32_t> arrived_;          // per param: number of parts
  std::vector<Expectation> expectations_;  // per param
};

}  // namespace ddpx
