#include "log_queue.h"

#include <utility>

#include "../os/forks.h"

namespace ddpx::health {

constexpr std::size_t kMostRecords = 1000;

LogQueue& LogQueue::instance() {
  return os::instance_in_process<LogQueue>();
}

void LogQueue::set_reader(std::function<bool()> start) {
  const std::lock_guard<std::mutex> lock(mutex_);
  start_ = std::move(start);
}

void LogQueue::add(Record record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (records_.size() < kMostRecords) {
    records_.push_back(std::move(record));
  }
  if (start_ && !is_read_) {
    is_read_ = start_();
  }
}

std::optional<Record> LogQueue::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (records_.empty()) {
    is_read_ = false;
    return std::nullopt;
  }
  auto record = std::move(records_.front());
  records_.pop_front();
  return record;
}

}  // namespace ddpx::health
