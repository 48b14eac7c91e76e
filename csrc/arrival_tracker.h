// When the gradient of a param is final in a backward, and which params are missing at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucket_plan.h"

namespace ddpx {

enum class Arrival {
  kFinal,     // nothing more will be added to this gradient in this backward
  kPartial,   // more may come, so it must not be packed yet
  kRepeated,  // it was final already: what was packed is wrong now
  kAbsent,    // its bucket does not wait for it, and has not packed it
};

// A layer in several reentrant checkpoints brings its gradients in several parts. How many is
// learned: in the first synchronised backward nothing is final before the end; later a gradient is
// final when as many parts have arrived as ever did in one backward (in a static graph: as in the
// first). Not thread-safe: the reducer's mutex guards it.
class ArrivalTracker {
 public:
  ArrivalTracker(std::size_t num_params, GraphMode mode);

  // Starts a synchronised backward. Nobody is to wait for `absent` params (frozen ones, or ones
  // that are predicted to be unused).
  void begin(const std::vector<std::size_t>& absent = {});

  Arrival arrive(std::size_t param_index);

  // Params whose gradient is neither final nor absent, in index order.
  std::vector<std::size_t> unfinished() const;

  // Those of them that are wrong as they stand: no part arrived; in a static graph, too few did.
  std::vector<std::size_t> missing() const;

  // Of the params, those that got a gradient in this backward.
  bool arrived(std::size_t param_index) const {
    return arrived_[param_index] > 0;
  }

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
  // Parts that make the gradient final in this backward.
  uint32_t awaited(std::size_t param_index) const;

  GraphMode mode_;
  std::vector<uint32_t> arrived_;   // per param, in this backward
  std::vector<bool> absent_;        // per param, in this backward
  std::vector<uint32_t> expected_;  // per param, once learned
  std::vector<std::size_t> known_unused_;
  std::vector<uint32_t> last_arrived_;  // per param, in the last backward
  bool always_the_same_ = true;
};

}  // namespace ddpx
