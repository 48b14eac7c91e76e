// What a person should hear of, on its way to Python's logging.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace ddpx::health {

enum class Level : uint8_t { kInfo, kWarning, kError };

// One fact.
struct Record {
  Level level = Level::kInfo;
  std::string event;    // "rank_failed", "stalled", ...
  std::string message;  // one line
  std::map<std::string, std::string> fields;
  uint64_t token = 0;  // of the page of the rank that it is about
};

// Those who add never wait. Thread-safe.
class LogQueue {
 public:
  static LogQueue& instance();

  // In a forked child: the next call makes a new queue. A thread of the parent may have been
  // using the old one.
  static void forget();

  void add(Record record);

  // Waits. None once it was closed.
  std::optional<Record> next();

  // Lets who waits go; `open` lets them come again.
  void close();
  void open();

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Record> records_;
  bool closed_ = false;
};

}  // namespace ddpx::health
