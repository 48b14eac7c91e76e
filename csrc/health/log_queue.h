// Messages on their way to Python's logging.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace ddpx::health {

enum class Level : uint8_t { kInfo, kWarning };

struct Record {
  Level level = Level::kInfo;
  std::string event;  // "rank_failed", "stalled", ...
  std::string message;
  std::map<std::string, std::string> fields;
  uint64_t token = 0;  // of the status page of the rank that logs
};

// Owned by the watchdog. Thread-safe.
class LogQueue {
 public:
  // Does not wait. The record is lost if many records wait already: there may be no reader.
  void add(Record record);

  // Waits for a record. Returns nullopt once the queue is closed and empty.
  std::optional<Record> next();

  // Ends the wait of the reader. `open` allows a reader again.
  void close();
  void open();

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Record> records_;
  bool closed_ = false;
};

}  // namespace ddpx::health
