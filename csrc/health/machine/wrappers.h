// The wrappers of one rank in one group: their numbers, constructions and missing gradients.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "page.h"

namespace ddpx::health {

// Returns the params of one wrapper whose gradients have not come, and none if they are unknown.
// Called on the thread of the watchdog. Must not wait.
using MissingParams = std::function<std::vector<std::string>()>;

// Owned by the monitor. Thread-safe.
class Wrappers {
 public:
  explicit Wrappers(OwnPage& page) : page_(page) {}

  // Publish what the Python part does: the construction of a wrapper, each collective call of a
  // construction, and waits for buffers.
  void begin_construction();
  void begin_call();  // has no effect outside a construction
  void end_call();
  void note(Doing doing);

  // Numbers for model_of(): of the wrapper that all ranks have just constructed, and of another
  // wrapper that is about to make its first collective call.
  uint32_t number_of_constructed() const {
    return num_constructions_ - 1;
  }
  uint32_t next_number() {
    return kFirstOther + num_others_++;
  }

  void set_missing_params(uint8_t model, MissingParams missing_params);

  // "without gradients yet for 'a', 'b'". Empty if none is known to be missing, or if the rank
  // has not been in backward for long.
  std::string describe_missing(const Activity& own) const;

 private:
  OwnPage& page_;
  std::atomic<uint32_t> num_constructions_{0};
  std::atomic<uint32_t> num_others_{0};
  mutable std::mutex mutex_;                         // guards `missing_params_`
  std::map<uint8_t, MissingParams> missing_params_;  // by model, of its newest wrapper
};

}  // namespace ddpx::health
