// When the gradient of a param is final in a backward, and which params are missing at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../buckets/bucket_plan.h"

namespace ddpx {

enum class Arrival {
  kFinal,       // nothing more will be added to this gradient in this backward
  kPartial,     // more may come, so it must not be packed yet
  kRepeated,    // it was final already: what was packed is wrong now
  kFrozen,      // the param was frozen when the step began: nothing waits for its gradient
  kUnforeseen,  // the param was unused when the step began, and was packed as such
};

// A layer in several reentrant checkpoints brings its gradients in several parts. How many is
// learned: in the first synchronised backward nothing is final before the end; later a gradient is
// final when as many parts have arrived as ever did in one backward (in a static graph: as in the
// first). Not thread-safe: the reducer's mutex guards it.
class ArrivalTracker {
 public:
  ArrivalTracker(std::size_t num_params, GraphMode mode);

  // Starts a synchronised backward that waits for neither the `frozen` nor the `unused` params.
  // While learning it waits for unused params, too.
  void begin(
      const std::vector<std::size_t>& frozen = {}, const std::vector<std::size_t>& unused = {});

  Arrival arrive(std::size_t param_index);

  // Params that are still waited for, in index order.
  std::vector<std::size_t> unfinished() const;

  // Those of them that are wrong as they stand: no part arrived; in a static graph, too few did.
  std::vector<std::size_t> missing() const;

  // Of the params, those that got a gradient in this backward.
  bool arrived(std::size_t param_index) const {
    return arrived_[param_index] > 0;
  }

  // Params that this backward does not wait for because they are unused, in index order.
  std::vector<std::size_t> unused() const;

  // Params that the static graph never reaches; empty in the other modes and while learning.
  const std::vector<std::size_t>& known_unused() const {
    return known_unused_;
  }

  // Ends a backward that came to its end.
  void end();

  // Whether all backwards so far brought the same number of parts of every gradient.
  bool always_the_same() const {
    return always_the_same_;
  }

  // True until the first synchronised backward has ended.
  bool learning() const {
    return expected_.empty();
  }

 private:
  enum class Expectation : uint8_t { kGradient, kFrozen, kUnused };

  // Parts that make the gradient final in this backward.
  uint32_t awaited(std::size_t param_index) const;

  GraphMode mode_;
  std::vector<uint32_t> arrived_;          // per param, in this backward
  std::vector<Expectation> expectations_;  // per param, in this backward
  std::vector<uint32_t> expected_;         // per param, once learned
  std::vector<std::size_t> known_unused_;
  std::vector<uint32_t> last_arrived_;  // per param, in the last backward
  bool always_the_same_ = true;
};

}  // namespace ddpx
