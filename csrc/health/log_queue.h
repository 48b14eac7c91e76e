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

struct Record {
  std::string event;  // "rank_failed", "stalled", ...
  std::string message;
  std::map<std::string, std::string> fields;
  uint64_t token = 0;  // of the status page of the rank that logs
};

// One a process, with one reader. Thread-safe.
class LogQueue {
 public:
  static LogQueue& instance();

  // Does not wait. The record is lost if many records wait already: there may be no reader.
  void add(Record record);

  // Waits for a record. Returns nullopt once for each call of close(), after all earlier records.
  std::optional<Record> next();
  void close();

 private:
  void push(std::optional<Record> record);

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::optional<Record>> records_;
};

}  // namespace ddpx::health
