// Everything that observes the steps of a reducer, fed by one function: emit().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../buckets/bucket_plan.h"
#include "../comm/in_flight_reduction.h"
#include "../health/calls/step_tracker.h"
#include "device_progress.h"
#include "recording.h"
#include "step_clock.h"

namespace ddpx {

// The events of a step, in the usual order. `index` in emit() is a param index for kGradArrived,
// and a bucket index for the events of buckets.
enum class StepEvent : uint8_t {
  kForwardBegin,
  kModuleForwardBegin,  // the module's own forward begins, after buffers were synchronized
  kForwardEnd,
  kRebuildBegin,
  kRebuildEnd,
  kOutputReached,  // a backward has reached an output of the module
  kStepBegin,      // the first gradient of a synchronized backward
  kGradArrived,    // once for every part of a gradient that comes in parts
  kBucketReady,    // the bucket has all its gradients
  kLaunched,       // the reduction of the bucket is launched
  kHookBegin,      // a communication hook runs
  kHookEnd,
  kBackwardEnd,  // only communication is left to do
  kUseAgreement,
  kWaitBegin,  // for a bucket
  kWaitEnd,
  kAgreeBegin,  // on the use of params, mispredicted buckets and finite gradients
  kAgreeEnd,
  kCommEnd,
  kWrittenBack,  // the gradients of the bucket are where `param.grad` finds them
  kStepEnd,
  kIdle,
  kLocalBackwardEnd,  // of a backward that is not synchronized
  kReady,             // backward has ended, and finalize_backward() is awaited
};

// The observers are: recordings (timeline), the clock of sampled steps (logging data), and the
// states of host and device published to peers (failure reports). An observer that is off costs a
// few nanoseconds per event.
//
// The reducer owns the observer, under its mutex.
class StepObserver {
 public:
  // Tells all observers of an event in step number `step`.
  void emit(StepEvent event, uint32_t step, std::size_t index = 0);

  // The reducer has entered the phase with this number.
  void emit_phase(uint32_t step, std::size_t phase);

  // A new plan holds from this step on.
  void emit_plan(uint32_t step, const BucketPlan& plan);

  // Records when the reduction of this bucket has ended.
  void follow(const InFlightReduction& reduction, uint32_t step, std::size_t bucket_index);

  // Reads the times of recorded events that a device has passed by now.
  void collect();

  // `plan` holds in step number `step`, which is the first one to be recorded.
  void add_recording(std::shared_ptr<Recording> recording, uint32_t step, const BucketPlan& plan);
  void remove_recording(const std::shared_ptr<Recording>& recording);

  bool recorded() const {
    return !recordings_.empty();
  }

  // Publishes this wrapper's steps to peers from now on, after `num_steps` steps.
  void publish(health::StepTracker peers, std::vector<c10::Device> devices, int64_t num_steps) {
    device_ = DeviceProgress(peers.monitor(), std::move(devices), num_steps);
    peers_ = std::move(peers);
  }

  const DeviceProgress& device() const {
    return device_;
  }

  // Whether the steps of this wrapper are captured from now on.
  void set_captured(bool captured) {
    device_.set_captured(captured);
  }

  StepClock& clock() {
    return clock_;
  }
  const StepClock& clock() const {
    return clock_;
  }

  // Publishes the state of this wrapper's steps to peers. health::StepGuard raises.
  health::StepTracker& peers() {
    return peers_;
  }

 private:
  StepClock clock_;
  health::StepTracker peers_;
  DeviceProgress device_;
  std::vector<std::shared_ptr<Recording>> recordings_;
};

}  // namespace ddpx
