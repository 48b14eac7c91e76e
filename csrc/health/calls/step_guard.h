// The guard of the steps of one wrapper: it raises when the group cannot continue.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../machine/recent_steps.h"
#include "../monitor.h"

namespace ddpx::health {

// Owned by the reducer. Has no effect without a monitor. A method may be called without the mutex
// of the reducer; one thread at a time calls compare_calls().
class StepGuard {
 public:
  StepGuard() = default;
  explicit StepGuard(std::shared_ptr<Monitor> monitor) : monitor_(std::move(monitor)) {}

  bool failed() const {
    return monitor_ && monitor_->failed();
  }

  // Before a forward or a backward. Throws if the group cannot continue.
  void check() const {
    if (monitor_) {
      monitor_->check_process();
      monitor_->raise_if_failed();
      monitor_->page().go_on();
    }
  }

  // After check(), if there are several hosts. Waits while other hosts may have declared this host
  // lost.
  bool has_lease() const {
    return monitor_ && monitor_->state().has_lease();
  }
  void await_lease() const {
    if (monitor_) {
      monitor_->await_lease();
    }
  }

  // A backward of this rank has raised an error.
  void publish_fault(const std::string& text) const {
    if (monitor_ && !failed()) {
      monitor_->page().publish_fault(Fault::kOfStep, text);
    }
  }

  // After an error in a collective call. Throws if ranks are lost.
  void explain_error(const std::string& said) const {
    if (monitor_) {
      monitor_->explain_error(said);
    }
  }

  // Declares that ranks made different calls, and raises.
  void raise_mismatch(const std::string& how) const {
    if (monitor_) {
      monitor_->raise_mismatch({FailureKind::kMismatch, {}, how});
    }
  }

  // After a step whose calls and results are published. Raises if ranks made different calls, or
  // froze different params. If results differ, waits up to a second for ranks that have not
  // finished the step, and compares again a step later. `param_names`: of all params of the
  // wrapper.
  void compare_calls(const StepCalls& calls, const std::vector<std::string>& param_names);

 private:
  void compare(
      const StepCalls& calls, bool is_over, const std::vector<std::string>& param_names) const;

  std::shared_ptr<Monitor> monitor_;
  StepCalls last_;  // of the previous step, if that step ended
};

}  // namespace ddpx::health
