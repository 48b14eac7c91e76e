#include "log_queue.h"

#include <utility>

namespace ddpx::health {

constexpr std::size_t kMostRecords = 1000;

void LogQueue::add(Record record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() >= kMostRecords) {
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
