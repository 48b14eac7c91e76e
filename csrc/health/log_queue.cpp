#include "log_queue.h"

#include <utility>

#include "forks.h"

namespace ddpx::health {

constexpr std::size_t kMostRecords = 1000;

LogQueue& LogQueue::instance() {
  return instance_in_process<LogQueue>();
}

void LogQueue::add(Record record) {
  push(std::move(record));
}

void LogQueue::close() {
  push(std::nullopt);
}

void LogQueue::push(std::optional<Record> record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (record && records_.size() >= kMostRecords) {
      return;
    }
    records_.push_back(std::move(record));
  }
  added_.notify_one();
}

std::optional<Record> LogQueue::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  added_.wait(lock, [this] { return !records_.empty(); });
  auto record = std::move(records_.front());
  records_.pop_front();
  return record;
}

}  // namespace ddpx::health
