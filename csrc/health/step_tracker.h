// What one wrapper lets its peers know of its steps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "monitor.h"

namespace ddpx::health {

// Nothing happens where there is no monitor. To be used with the reducer's mutex held.
class StepTracker {
 public:
  StepTracker() = default;
  StepTracker(std::shared_ptr<Monitor> monitor, MissingParams missing_params);

  // All ranks have just constructed this wrapper together.
  void number_as_constructed();

  // The same wrapper, as its ranks know it, has a new reducer.
  void continue_from(const StepTracker& older);

  // What this rank does from here on.
  void note(Doing doing, std::size_t bucket = 0) {
    if (monitor_) {
      monitor_->page().note(doing, calls_, bucket);
    }
  }

  // A forward or a backward begins: nobody should compute for a group that cannot go on. Throws.
  void check() const {
    if (monitor_) {
      monitor_->check_process();
      monitor_->raise_if_failed();
      monitor_->await_lease();
    }
  }

  // A step that has not launched anything yet. The same number on all ranks.
  void begin_step(uint32_t step) {
    calls_ = StepCalls{calls_.model, step, 0, 0, 0, 0, 0, calls_.wrapper};
    sample_ = 0;
  }

  // The step broke off. What this rank did last is left to be seen, unless it was a wait. Peers may
  // come to the step's end: they hear, too, of results that are spoiled.
  void break_off();

  // A bucket is about to leave.
  void note_launch(int64_t num_bytes, int dtype);

  // A bucket is back on CPU, with the same bits on all ranks if all made the same calls. Looks at
  // a few of them, since a look at all would cost as much as another copy.
  void note_result(const void* data, std::size_t num_bytes);

  // This rank has found something wrong with its own gradients: its results say nothing.
  void spoil_results() {
    sample_.reset();
  }

  // After an error in a collective call: throws if it came because ranks are gone.
  void explain_error(const std::string& said) const {
    if (monitor_) {
      monitor_->explain_error(said);
    }
  }

  // Ranks have made different calls: raises, as all do.
  void raise_mismatch(const std::string& how) const {
    if (monitor_) {
      monitor_->raise_mismatch(how);
    }
  }

  // All buckets of the step are back: raises if ranks made different calls. Where what came back
  // differs, it waits for a moment for who is not here yet; a step later all have been here.
  void check_calls();

  void name_buckets(std::vector<std::vector<std::string>> names) {
    names_ = std::move(names);
    if (monitor_) {
      monitor_->peers().names().set(calls_.model, names_);
    }
  }

  bool on() const {
    return monitor_ != nullptr;
  }

  bool group_failed() const {
    return monitor_ && monitor_->failed();
  }

 private:
  void set_number(uint32_t wrapper);
  void compare(const StepCalls& calls, bool is_over) const;

  std::shared_ptr<Monitor> monitor_;
  MissingParams missing_params_;
  std::vector<std::vector<std::string>> names_;  // of the params, by bucket
  StepCalls calls_{kNotNumbered};
  std::optional<uint64_t> sample_;  // of this step's results, as far as they are back
  StepCalls last_;                  // of the step before, if it came to its end
};

}  // namespace ddpx::health
