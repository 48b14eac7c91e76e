// Publishes the steps of one wrapper to its peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../monitor.h"

namespace ddpx::health {

// Owned by the reducer's observer. Callers have exclusive access to the reducer: they hold its
// mutex, or released it to wait (Occupation). Has no effect without a monitor.
class StepTracker {
 public:
  StepTracker() = default;
  explicit StepTracker(std::shared_ptr<Monitor> monitor, WrapperNames::Names names = {});

  // After all ranks have constructed this wrapper together.
  void number_as_constructed();

  // Publishes the activity of this rank from now on. `bucket`: see is_about_a_bucket().
  void publish(Doing doing, std::size_t bucket = 0);

  // A forward begins in this thread. Publishes whether it is the main thread.
  void publish_thread() const;

  // A step begins. `step` is the same on all ranks.
  void begin_step(uint32_t step) {
    calls_ = StepCalls{.wrapper = calls_.wrapper, .step = step};
    next_bucket_ = 0;
    sample_ = 0;
  }

  // This rank froze these params, ascending, in the step that has begun. Its peers must have frozen
  // the same params.
  void publish_frozen(const ParamIndices& params);

  // The settings of the step that has begun: flags of StepCalls::settings.
  void set_settings(uint64_t settings) {
    calls_.settings = settings;
  }

  // The step was aborted. The last activity stays published, unless it was a wait. Peers that end
  // the step learn whether the results of this rank are invalid.
  void break_off();

  // Before a bucket is launched.
  void publish_launch(std::size_t bucket, int64_t num_bytes, int dtype);

  // After the reduction of a bucket on CPU. All ranks have the same bits if all made the same
  // calls. Samples a few words, since reading all would cost as much as another copy.
  void add_result(const void* data, std::size_t num_bytes);

  // This rank's own gradients are wrong, so its results are not compared.
  void spoil_results() {
    sample_.reset();
  }

  // After all buckets of the step. Publishes the results, and returns the calls of the step.
  StepCalls publish_results();

  // The wait for all buckets of this step.
  Activity waiting_for_all() const;

  const std::shared_ptr<Monitor>& monitor() const {
    return monitor_;
  }

  // The names of the params of each bucket.
  void name_buckets(std::vector<std::vector<std::string>> buckets);

 private:
  void set_number(uint32_t wrapper);
  void publish_changed_frozen();
  Activity activity(Doing doing, std::size_t bucket) const;

  std::shared_ptr<Monitor> monitor_;
  WrapperNames::Names names_;
  StepCalls calls_{.wrapper = kUnnumbered};
  std::size_t next_bucket_ = 0;     // the next bucket to launch
  std::optional<uint64_t> sample_;  // of the buckets of this step that are reduced
  uint64_t published_frozen_ = digest_of({});
  std::optional<ParamIndices> frozen_;  // to be published
};

}  // namespace ddpx::health
