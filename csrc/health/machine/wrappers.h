// The wrappers of one rank in one group: their numbers and constructions.
#pragma once

#include <atomic>
#include <cstdint>

#include "page.h"

namespace ddpx::health {

// Owned by the monitor. Thread-safe.
class Wrappers {
 public:
  explicit Wrappers(OwnPage& page) : page_(page) {}

  // Publish the activity of the Python part: the construction of a wrapper, each collective call of
  // a construction, and waits for buffers.
  void begin_construction();
  void begin_call();  // has no effect outside a construction
  void end_call();
  void note(Doing doing);

  // Numbers for model_of(): for the wrapper that all ranks have just constructed, and for another
  // wrapper before its first collective call.
  uint32_t number_of_constructed() const {
    return num_constructions_ - 1;
  }
  uint32_t next_number() {
    return kFirstOther + num_others_++;
  }

 private:
  OwnPage& page_;
  std::atomic<uint32_t> num_constructions_{0};
  std::atomic<uint32_t> num_others_{0};
};

}  // namespace ddpx::health
