// Publishes what the devices of a rank do of the steps that its host has queued.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../health/calls/step_tracker.h"

namespace ddpx {

// The hosts of ranks on a device queue collective calls and go on. So peers also see the activity
// of the device. It is about the oldest step that the device has not finished: the device computes
// gradients (Doing::kBackward), or waits for all-reduces (Doing::kWaiting). The devices of a module
// on several devices count as one.
//
// A step has two events in the stream of each device that ends it: before and after its waits for
// buckets. A thread of the process asks for them ten times a second. It asks in the capture mode in
// which other threads may capture graphs. A stream that is captured gets no events. Up to
// kMostSteps steps have events at a time: the oldest ones and the newest one.
//
// Owned by the observer of steps, under the reducer's mutex. Has no effect without a monitor, and
// on CPU.
class DeviceProgress {
 public:
  DeviceProgress() = default;
  // `devices`: of one type. `num_steps`: how many steps they have done already.
  DeviceProgress(
      std::shared_ptr<health::Monitor> monitor,
      std::vector<c10::Device> devices,
      int64_t num_steps);

  // Whether steps are captured from now on. torch 2.11 does not tell it of a stream, and a query of
  // a captured event makes the capture invalid.
  void set_captured(bool captured);

  // On the stream that ends the step: the gradients of this rank come before.
  void mark_computed();

  // On the same stream: the waits for all buckets come before. `waiting`: what the device does
  // until then, for peers.
  void mark_reduced(const health::Activity& waiting);

  // The number of steps that the device is known to have done before an abort. The averages of
  // later steps may be wrong: an aborted all-reduce ends like a complete one. nullopt where the
  // host waits for all-reduces.
  std::optional<int64_t> num_reduced() const;

 private:
  using Events = std::vector<c10::Event>;  // one for each device
  struct Steps;
  class Thread;

  template <class Record>
  void without_errors(const Record& record);
  void record_computed();
  void record_reduced(const health::Activity& waiting);
  bool is_captured() const;
  void record(Events& events) const;

  std::shared_ptr<Steps> steps_;                       // null: no effect
  std::shared_ptr<std::atomic<int64_t>> num_reduced_;  // null where the host waits
  std::vector<c10::Device> devices_;
  bool captured_ = false;
  std::optional<Events> computed_;  // of the step that ends
};

}  // namespace ddpx
