// The recorded events of a reducer's steps.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../buckets/bucket_plan.h"
#include "../comm/in_flight_reduction.h"
#include "device_marks.h"
#include "event_log.h"

namespace ddpx {

// A bucket plan, and the first step in which the plan holds.
struct PlanInForce {
  uint32_t first_step;
  BucketPlan plan;
};

// The reducer fills the recording, with its mutex held. Threads of the backend add the ends of
// all-reduces. On a device, the time of an event is when the device passed the event in its stream.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  // Has room for `capacity` events. `device` is the device on which the module computes. Only the
  // first `max_steps` steps are recorded, or all steps if `max_steps` is 0.
  Recording(std::size_t capacity, c10::Device device, uint32_t max_steps);

  // `plan` holds from this step on. To be called before the first event of the step.
  void record_plan(uint32_t step, const BucketPlan& plan);

  // On a device, an event is a mark in the stream. If a mark cannot be made, the recording gives up
  // the step: the step lacks its end, and counts as not completed.
  void record(EventKind kind, uint32_t step, std::size_t index);

  // Records an event with the present time of the host, also on a device.
  void record_on_host(EventKind kind, uint32_t step, std::size_t index);

  // Records kCompleted when the reduction ends.
  void follow(const InFlightReduction& reduction, uint32_t step, std::size_t index);

  // Reads the times of all events that the device has passed by now.
  void collect() noexcept;

  // Waits for the device, and reads the times of all events.
  void close();

  const EventLog& log() const {
    return log_;
  }
  // A copy: any thread may call this, with the reducer's mutex or without.
  std::vector<PlanInForce> plans() const {
    const std::lock_guard<std::mutex> lock(plans_mutex_);
    return plans_;
  }
  // Error bound of device times on the host's clock; 0 on CPU.
  int64_t device_error_ns() const {
    return marks_ ? marks_->error_ns() : 0;
  }

 private:
  bool wants(uint32_t step) const {
    return (max_steps_ == 0 || step - first_step_ < max_steps_) && step != given_up_;
  }

  // Adds a mark by `add`, which returns false if it cannot. Gives up the step then.
  void mark(uint32_t step, const std::function<bool()>& add);
  void give_up(uint32_t step);

  EventLog log_;
  uint32_t max_steps_;
  uint32_t first_step_ = 0;            // set before other threads use this recording
  std::atomic<int64_t> given_up_{-1};  // the last step of which a mark could not be made
  std::optional<DeviceMarks> marks_;
  mutable std::mutex plans_mutex_;
  std::vector<PlanInForce> plans_;  // guarded by plans_mutex_
};

}  // namespace ddpx
