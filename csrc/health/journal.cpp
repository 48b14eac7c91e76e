#include "journal.h"

#include <atomic>
#include <utility>

namespace ddpx::health {
namespace {

// Nobody may be reading.
constexpr std::size_t kMost = 1000;

std::atomic<Journal*> current{nullptr};

}  // namespace

Journal& Journal::instance() {
  if (auto* journal = current.load()) {
    return *journal;
  }
  auto* made = new Journal;  // never destroyed: threads may still add at exit
  Journal* other = nullptr;
  if (current.compare_exchange_strong(other, made)) {
    return *made;
  }
  delete made;  // another thread was quicker
  return *other;
}

void Journal::forget() {
  current.store(nullptr);
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
