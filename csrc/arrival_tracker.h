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
};

// In a static graph the first synchronised backward is for learning how often each param arrives:
// there nothing is final before the end. Not thread-safe: the reducer's mutex guards it.
class ArrivalTracker {
 public:
  ArrivalTracker(std::size_t num_params, GraphMode mode);

  // Starts a synchronised backward.
  void begin();

  Arrival arrive(std::size_t param_index);

  // Params whose gradient is not final, in index order. While learning: those that never arrived.
  std::vector<std::size_t> missing() const;

  // Params that the static graph never reaches; empty in the other modes and while learning.
  const std::vector<std::size_t>& known_unused() const {
    return known_unused_;
  }

  // Ends a backward that came to its end; a learning tracker knows the graph from here on.
  void end();

  // True in a static graph until its first synchronised backward has ended.
  bool learning() const {
    return mode_ == GraphMode::kStatic && expected_.empty();
  }

 private:
  GraphMode mode_;
  std::vector<uint32_t> arrived_;   // per param, in this backward
  std::vector<uint32_t> expected_;  // per param, once a static graph is known
  std::vector<std::size_t> known_unused_;
};

}  // namespace ddpx
