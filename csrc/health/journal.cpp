#include "journal.h"

#include <utility>

namespace ddpx::health {
namespace {

// Nobody may be reading.
constexpr std::size_t kMost = 1000;

}  // namespace

Journal& Journal::instance() {
  static auto* instance = new Journal;  // never destroyed: threads may still add at exit
  return *instance;
}

void Journal::add(Record record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() >= kMost) {
      return;
    }
    records_.push_back(std::move(record));
  }
  added_.notify_one();
}

std::optional<Record> Journal::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  added_.wait(lock, [this] { return closed_ || !records_.empty(); });
  if (records_.empty()) {
    return std::nullopt;
  }
  auto record = std::move(records_.front());
  records_.pop_front();
  return record;
}

void Journal::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  added_.notify_all();
}

void Journal::open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = false;
}

}  // namespace ddpx::health
