// Times of what a device does, read when it has been done.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "event_log.h"

namespace ddpx {

// A kernel runs later than the call that queues it. A mark is a timing event behind it in its
// stream; nothing waits for it in a step. Device-generic, for one device. Any thread may call.
// While a thread's current stream is captured (into a CUDA graph, say), events would become part of
// the graph, and questions about them would end the capture: nothing is done then.
class DeviceMarks {
 public:
  // Room for `capacity` marks that the device has not passed. Waits for the device, to relate its
  // clock to the host's, which `now` reads.
  DeviceMarks(c10::Device device, std::size_t capacity, int64_t (*now)() = &steady_now);

  // Behind what the current stream has to do. False if there is no room, or the stream is captured.
  bool mark(EventKind kind, uint32_t step, std::size_t index);

  // Moves the times of marks that the device has passed into the log.
  void collect(EventLog& log);

  // As collect(), of all; waits for the device.
  void collect_all(EventLog& log);

  // How far times may be off the host's clock: half of what it took to relate the clocks, what they
  // were found to have drifted apart, and the rounding of elapsed times.
  int64_t error_ns() const;

 private:
  struct Mark {
    c10::Event event;
    EventKind kind;
    uint32_t step;
    std::size_t index;
  };

  bool captured() const;
  c10::Event record() const;
  int64_t time_of(const c10::Event& event) const;
  void relate();
  void move_passed_to(EventLog& log);

  c10::Device device_;
  std::size_t capacity_;
  int64_t (*now_)();
  mutable std::mutex mutex_;  // guards what follows
  c10::Event anchor_;         // its time on the host's clock is known
  int64_t anchor_ns_ = 0;
  int64_t anchor_error_ns_ = 0;
  int64_t worst_error_ns_ = 0;  // of times that were counted from earlier anchors
  std::deque<Mark> marks_;
};

}  // namespace ddpx
