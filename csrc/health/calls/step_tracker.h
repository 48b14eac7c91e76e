// Publishes the steps of one wrapper to its peers, and compares them with the steps of the peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../monitor.h"

namespace ddpx::health {

// Owned by the reducer's observer. Callers have exclusive access to the reducer: they hold its
// mutex, or released it to wait (Occupation). Has no effect without a monitor.
class StepTracker {
 public:
  StepTracker() = default;
  // `param_names`: the names of all params of the wrapper.
  StepTracker(
      std::shared_ptr<Monitor> monitor,
      MissingParams missing_params,
      std::vector<std::string> param_names = {});

  // After all ranks have constructed this wrapper together.
  void number_as_constructed();

  // Publishes the activity of this rank from now on. `bucket`: see is_about_a_bucket().
  void note(Doing doing, std::size_t bucket = 0);

  // Before a forward or a backward. Throws if the group cannot continue.
  void check() const {
    if (monitor_) {
      monitor_->check_process();
      monitor_->raise_if_failed();
      monitor_->page().go_on();
    }
  }

  // A backward of this rank has raised an error.
  void note_fault(const std::string& text) const {
    if (monitor_ && !monitor_->failed()) {
      monitor_->page().note_fault(Fault::kOfStep, text);
    }
  }

  // After check(), if there are several hosts. Waits while other hosts may have declared this host
  // lost, without the mutex of the reducer.
  bool has_lease() const {
    return monitor_ && monitor_->state().has_lease();
  }
  void await_lease() const {
    monitor_->await_lease();
  }

  // A step begins. `step` is the same on all ranks.
  void begin_step(uint32_t step) {
    calls_ = StepCalls{.wrapper = calls_.wrapper, .step = step};
    next_bucket_ = 0;
    sample_ = 0;
  }

  // This rank froze these params, ascending, in the step that has begun. Its peers must have frozen
  // the same params.
  void note_frozen(const ParamIndices& params);

  // The step was aborted. The last activity stays published, unless it was a wait. Peers that end
  // the step learn whether the results of this rank are invalid.
  void break_off();

  // Before a bucket is launched.
  void note_launch(std::size_t bucket, int64_t num_bytes, int dtype);

  // After the reduction of a bucket on CPU. All ranks have the same bits if all made the same
  // calls. Samples a few words, since reading all would cost as much as another copy.
  void note_result(const void* data, std::size_t num_bytes);

  // This rank's own gradients are wrong, so its results are not compared.
  void spoil_results() {
    sample_.reset();
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
      monitor_->raise_mismatch(how);
    }
  }

  // After all buckets of the step. Raises if ranks made different calls, or froze different params.
  // If results differ, waits up to a second for ranks that have not ended the step, and compares
  // again a step later.
  void check_calls();

  // The wait for all buckets of this step.
  Activity waiting_for_all() const;

  const std::shared_ptr<Monitor>& monitor() const {
    return monitor_;
  }

  void name_buckets(std::vector<std::vector<std::string>> names);

  bool on() const {
    return monitor_ != nullptr;
  }

  bool group_failed() const {
    return monitor_ && monitor_->failed();
  }

 private:
  void set_number(uint32_t wrapper);
  Activity activity(Doing doing, std::size_t bucket) const;
  void compare(const StepCalls& calls, bool is_over) const;

  std::shared_ptr<Monitor> monitor_;
  MissingParams missing_params_;
  std::vector<std::string> param_names_;
  std::vector<std::vector<std::string>> names_;  // of the params, by bucket
  StepCalls calls_{.wrapper = kUnnumbered};
  std::size_t next_bucket_ = 0;     // the next bucket to launch
  std::optional<uint64_t> sample_;  // of the buckets of this step that are reduced
  uint64_t published_frozen_ = digest_of({});
  StepCalls last_;  // of the step before, if that step ended
};

}  // namespace ddpx::health
