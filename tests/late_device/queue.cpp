#include "queue.h"

#include <atomic>
#include <utility>

namespace late {
namespace {

struct Trace {
  std::atomic<bool> enabled{false};
  std::mutex mutex;
  std::vector<Span> spans;
};

Trace& the_trace() {
  static auto* const instance = new Trace;
  return *instance;
}

struct Failure {
  std::mutex mutex;
  std::exception_ptr first;
};

Failure& the_failure() {
  static auto* const instance = new Failure;
  return *instance;
}

int64_t to_ns(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

Queue::Queue(int device, int64_t stream_id) : device_(device), stream_id_(stream_id) {
  std::thread([this] { work(); }).detach();
}

Position Queue::push(std::string name, std::function<void()> run) {
  Position position = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({std::move(name), std::move(run), Clock::now() + next_hold()});
    position = ++pushed_;
    if (hurries_) {
      demanded_ = position;
    }
  }
  changed_.notify_all();
  return position;
}

void Queue::hurry() {
  const std::lock_guard<std::mutex> lock(mutex_);
  hurries_ = true;
}

Position Queue::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Queue::passed(Position position) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return passed_ >= position;
}

void Queue::demand(Position position) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    demanded_ = std::max(demanded_, position);
  }
  changed_.notify_all();
}

void Queue::wait(Position position) {
  demand(position);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return passed_ >= position; });
}

void Queue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (tasks_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (demanded_ <= passed_ && Clock::now() < tasks_.front().due) {
      const auto due = tasks_.front().due;
      changed_.wait_until(lock, due);
      continue;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    const auto begin = Clock::now();
    if (const auto delay = delay_of(task.name); delay.count() != 0) {
      std::this_thread::sleep_for(delay);
    }
    try {
      task.run();
    } catch (...) {
      report_failure(std::current_exception());
    }
    task.run = nullptr;
    if (auto& trace = the_trace(); trace.enabled) {
      const std::lock_guard<std::mutex> trace_lock(trace.mutex);
      trace.spans.push_back(
          {std::move(task.name), device_, stream_id_, to_ns(begin), to_ns(Clock::now())});
    }
    lock.lock();
    ++passed_;
    changed_.notify_all();
  }
}

void report_failure(std::exception_ptr failure) {
  auto& f = the_failure();
  const std::lock_guard<std::mutex> lock(f.mutex);
  if (!f.first) {
    f.first = std::move(failure);
  }
}

void throw_failure() {
  auto& f = the_failure();
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(f.mutex);
    failure = std::exchange(f.first, nullptr);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void set_tracing(bool enabled) {
  auto& t = the_trace();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.spans.clear();
  t.enabled = enabled;
}

std::vector<Span> trace() {
  auto& t = the_trace();
  const std::lock_guard<std::mutex> lock(t.mutex);
  return t.spans;
}

}  // namespace late
