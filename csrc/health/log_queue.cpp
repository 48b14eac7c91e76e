#include "log_queue.h"

#include <atomic>
#include <utility>

namespace ddpx::health {
namespace {

// Nobody may be reading.
constexpr std::size_t kMost = 1000;

std::atomic<LogQueue*> current{nullptr};

}  // namespace

LogQueue& LogQueue::instance() {
  if (auto* queue = current.load()) {
    return *queue;
  }
  auto* made = new LogQueue;  // never destroyed: threads may still add at exit
  LogQueue* other = nullptr;
  if (current.compare_exchange_strong(other, made)) {
    return *made;
  }
  delete made;  // another thread was quicker
  return *other;
}

void LogQueue::forget() {
  current.store(nullptr);
}

void LogQueue::add(Record record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() >= kMost) {
      return;
    }
    records_.push_back(std::move(record));
  }
  added_.notify_one();
}

std::optional<Record> LogQueue::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  added_.wait(lock, [this] { return closed_ || !records_.empty(); });
  if (records_.empty()) {
    return std::nullopt;
  }
  auto record = std::move(records_.front());
  records_.pop_front();
  return record;
}

void LogQueue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  added_.notify_all();
}

void LogQueue::open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = false;
}

}  // namespace ddpx::health
