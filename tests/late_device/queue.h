// The work of one stream, carried out in order by a thread of its own, as late as permitted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "settings.h"

namespace late {

// A task's place in its queue, from 1. 0 is the place before every task.
using Ticket = uint64_t;

// A task runs when it is demanded, or when its hold time is over. Waiting for a task demands that
// task and every task before it, and no task of another queue; so two queues that no event connects
// run in the order that the program did not expect. Never destroyed. Thread-safe.
class Queue {
 public:
  Queue(int device, int64_t stream_id);

  int device() const {
    return device_;
  }
  int64_t stream_id() const {
    return stream_id_;
  }

  // `run` must hold no reference that keeps device memory alive: real kernels hold none.
  Ticket push(std::string name, std::function<void()> run);

  // From now on no task is held; each still waits for what it has to wait for.
  void hurry();

  // The place of the task that was pushed last.
  Ticket last() const;

  // Whether the task at `ticket` has run. Demands nothing.
  bool passed(Ticket ticket) const;

  // Lets everything up to `ticket` run without being held.
  void demand(Ticket ticket);

  // Demands `ticket` and blocks the calling thread until it has passed.
  void wait(Ticket ticket);

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    Clock::time_point due;
  };

  void work();

  const int device_;
  const int64_t stream_id_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  Ticket pushed_ = 0;
  Ticket passed_ = 0;
  Ticket demanded_ = 0;
  bool hurries_ = false;
};

// The first exception of a task. Kernels of a device cannot throw into the program: whoever next
// waits for the device on the host gets it.
void report_failure(std::exception_ptr failure);
void throw_failure();

// When tasks ran, for tests of overlap; collected while tracing is on.
struct Span {
  std::string name;
  int device;
  int64_t stream_id;
  int64_t begin_ns;
  int64_t end_ns;
};
void set_tracing(bool enabled);  // forgets what was collected
std::vector<Span> trace();

}  // namespace late
