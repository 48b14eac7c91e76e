// Streams of the late device: queues of tasks, each with a thread of its own.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace late {

constexpr int kNumDevices = 2;

// How late the device is. Read when a task is submitted.
struct Lateness {
  // A task runs when somebody waits for it, or after this time. 0: as soon as its stream is free.
  std::chrono::milliseconds hold{50};
  // Before a kernel starts: at least this long, at most twice as long, drawn from the seed.
  std::chrono::microseconds delay{200};
  uint64_t seed = 0;
};
Lateness lateness();
void set_lateness(const Lateness& lateness);

// Tasks run one after another, in order. Thread-safe; lives until the process ends.
class TaskQueue {
 public:
  using Task = std::function<void()>;
  using Clock = std::chrono::steady_clock;

  enum class Kind {
    kKernel,  // held back and delayed
    kWait,    // held back
    kSignal,  // runs as soon as the tasks before it have run
  };

  explicit TaskQueue(uint64_t seed);

  // Returns the task's number, counted from 1.
  uint64_t submit(Kind kind, Task task);

  // The tasks up to this one are needed now: nothing holds them back any more.
  void demand(uint64_t number);

  // Blocks the calling thread until the task has run. Throws what a task of this queue has thrown.
  void wait_for(uint64_t number);

  bool has_run(uint64_t number) const;

  // Of the task that was submitted last; 0 if there was none.
  uint64_t last() const;

 private:
  struct Entry {
    Kind kind;
    Task task;
    Clock::time_point deadline;
  };

  void work();
  void delay(Kind kind);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  uint64_t num_submitted_ = 0;
  uint64_t num_run_ = 0;
  uint64_t demanded_ = 0;
  std::exception_ptr error_;
  std::mt19937_64 random_;  // of the queue's own thread
};

// What an event, or a wait, refers to.
struct Point {
  TaskQueue* queue = nullptr;
  uint64_t number = 0;

  bool passed() const {
    return queue == nullptr || queue->has_run(number);
  }
  void wait() const {
    if (queue != nullptr) {
      queue->wait_for(number);
    }
  }
};

TaskQueue& queue_of(const c10::Stream& stream);
Point end_of(const c10::Stream& stream);

// Tasks that `stream` gets from now on run behind `point`.
void make_wait(const c10::Stream& stream, const Point& point);

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device);
void synchronize(c10::DeviceIndex device);

}  // namespace late
