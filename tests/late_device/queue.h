// The work of one stream. A thread per queue runs it in order, as late as permitted.
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

// The position of a task in its queue, from 1. 0 is the position before all tasks.
using Position = uint64_t;

// A task runs when it is demanded, or when its hold time is over. A wait for a task demands that
// task and all tasks before it, but no task of another queue. Two queues that no event connects
// therefore run in an order that the program does not expect. Thread-safe. Never destroyed.
class Queue {
 public:
  Queue(int device, int64_t stream_id);

  int device() const {
    return device_;
  }
  int64_t stream_id() const {
    return stream_id_;
  }

  // `run` must not keep device memory alive, since real kernels do not.
  Position push(std::string name, std::function<void()> run);

  // Later tasks are not held. They still wait for events.
  void hurry();

  // The position of the last task.
  Position last() const;

  // Whether the task at `position` has run. Does not demand the task.
  bool passed(Position position) const;

  // Ends the hold of all tasks up to `position`.
  void demand(Position position);

  // Demands `position` and blocks the calling thread until that task has run.
  void wait(Position position);

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    Clock::time_point due;
  };

  void work();

  const int device_;
  const int64_t stream_id_;
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  Position pushed_ = 0;
  Position passed_ = 0;
  Position demanded_ = 0;
  bool hurries_ = false;
};

// The first exception of a task. Kernels cannot throw into the program, so the next wait of the
// host for the device throws it.
void report_failure(std::exception_ptr failure);
void throw_failure();

// The times of tasks, for tests of overlap. Collected while tracing is on.
struct Span {
  std::string name;
  int device;
  int64_t stream_id;
  int64_t begin_ns;
  int64_t end_ns;
};
void set_tracing(bool enabled);  // deletes collected times
std::vector<Span> trace();

}  // namespace late
