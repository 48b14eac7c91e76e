// Times of events in the streams of a device.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "event_log.h"

namespace ddpx {

// A kernel runs later than the call that queues it. A mark is a timing event behind the kernel in
// its stream. No step waits for a mark. One object serves one device of any type. Any thread may
// call. While the current stream of the thread is captured (into a CUDA graph, for example), the
// calls do nothing: events would become part of the graph, and queries of events would end the
// capture.
class DeviceMarks {
 public:
  // Has room for `capacity` marks that the device has not passed. Waits for the device, to relate
  // its clock to the clock of the host, which `now` reads.
  DeviceMarks(c10::Device device, std::size_t capacity, int64_t (*now)() = &steady_now);

  // Adds a mark at the end of the current stream. Returns false if there is no room, or if the
  // stream is captured.
  bool mark(EventKind kind, uint32_t step, std::size_t index);

  // Adds a mark behind the work of a future that has completed: the work is queued, and the device
  // may run the work later. Returns false as above.
  //
  // The mark is in a stream for marks alone, which waits for the work also if another device does
  // it. With a callback of the future, each mark would be in another stream of torch's pool, and a
  // stream of the training script, which comes from the same pool, would sometimes wait for the
  // work.
  bool mark_end(c10::ivalue::Future& work, EventKind kind, uint32_t step, std::size_t index);

  // Moves the times of marks that the device has passed into the log.
  void collect(EventLog& log);

  // Waits for the device, then moves the times of all marks into the log.
  void collect_all(EventLog& log);

  // Error bound of times on the clock of the host: half the time that relating the clocks took,
  // plus the measured drift, plus the rounding of elapsed times.
  int64_t error_ns() const;

 private:
  struct Mark {
    c10::Event event;
    EventKind kind;
    uint32_t step;
    std::size_t index;
  };

  bool has_room() const;
  c10::Event record();
  c10::Stream end_stream(c10::Device device);
  int64_t time_of(const c10::Event& event) const;
  void relate();
  void move_passed_to(EventLog& log);

  c10::Device device_;
  std::size_t capacity_;
  int64_t (*now_)();
  mutable std::mutex mutex_;  // guards all members below
  c10::Event anchor_;         // its time on the clock of the host is known
  int64_t anchor_ns_ = 0;
  int64_t anchor_error_ns_ = 0;
  int64_t worst_error_ns_ = 0;  // of times that were computed from earlier anchors
  std::deque<Mark> marks_;
  // Events to record again, since making an event takes longer.
  std::vector<c10::Event> spare_;
  std::vector<c10::Stream> ends_;  // of mark_end(), one for each device
};

}  // namespace ddpx
