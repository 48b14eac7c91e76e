// Whether a script waits for the averages of each step before it applies them.
#pragma once

#include <cstdint>
#include <optional>

namespace ddpx {

// On a device, the averages of a step may be wrong after an abort. A script that waits in each step
// has applied no averages that it has not waited for. The reducer owns this object, under its
// mutex.
class AwaitedSteps {
 public:
  // A forward begins after `num_steps` steps. Without a wait for the last one, the script may have
  // applied its averages.
  void begin_forward(int64_t num_steps) {
    waits_always_ = waits_always_ && num_steps <= num_waited_;
  }

  // The script has waited for the averages of `num_steps` steps.
  void mark_waited(int64_t num_steps) {
    num_waited_ = num_steps;
    has_waited_ = true;
  }

  // Other ranks have made `num_steps` steps.
  void move_to(int64_t num_steps) {
    num_waited_ = num_steps;
  }

  // The number of steps that the script has waited for; nullopt if it does not wait in each step.
  std::optional<int64_t> number() const {
    return waits_always_ && has_waited_ ? std::optional(num_waited_) : std::nullopt;
  }

 private:
  int64_t num_waited_ = 0;
  bool has_waited_ = false;
  bool waits_always_ = true;
};

}  // namespace ddpx
