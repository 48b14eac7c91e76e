// What someone who looks into a reducer gets to see of its steps.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../buckets/bucket.h"
#include "../buckets/bucket_plan.h"
#include "device_marks.h"
#include "event_log.h"

namespace ddpx {

// A plan, and the first step that it holds for.
struct PlanInForce {
  uint32_t first_step;
  BucketPlan plan;
};

// Filled by the reducer, with its mutex held, but for the ends of all-reduces, which come from
// threads of the backend. On a device, times are those at which the device came by.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  // Room for `capacity` events. `device` is the one on which the module computes. `max_steps` from
  // the first on are noted, all if 0.
  Recording(std::size_t capacity, c10::Device device, uint32_t max_steps);

  // From here on; the plan of each step must be known before anything else of it.
  void note_plan(uint32_t step, const BucketPlan& plan);

  // On a device a step is given up if one of its marks cannot be made: it lacks its end, and counts
  // as one that was not completed.
  void note(EventKind kind, uint32_t step, std::size_t index);

  // What the host does, whatever the device does.
  void note_on_host(EventKind kind, uint32_t step, std::size_t index);

  // Notes kCompleted when what was just launched has ended.
  void follow(const Bucket::Flight& flight, uint32_t step, std::size_t index);

  // Reads the times of what a device has done by now; throws nothing.
  void collect() noexcept;

  // As collect(), of everything; waits for a device.
  void close();

  const EventLog& log() const {
    return log_;
  }
  // A copy: any thread may call this, with the reducer's mutex or without.
  std::vector<PlanInForce> plans() const {
    const std::lock_guard<std::mutex> lock(plans_mutex_);
    return plans_;
  }
  // Of the device's clock against the host's; 0 on CPU.
  int64_t device_error_ns() const {
    return marks_ ? marks_->error_ns() : 0;
  }

 private:
  bool wants(uint32_t step) const {
    return (max_steps_ == 0 || step - first_step_ < max_steps_) && step != given_up_;
  }

  void give_up(uint32_t step);

  EventLog log_;
  uint32_t max_steps_;
  uint32_t first_step_ = 0;            // set before anybody else knows of this recording
  std::atomic<int64_t> given_up_{-1};  // the last step of which a mark could not be made
  std::optional<DeviceMarks> marks_;
  mutable std::mutex plans_mutex_;
  std::vector<PlanInForce> plans_;  // guarded by plans_mutex_
};

}  // namespace ddpx
