// Messages on their way to Python's logging.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace ddpx::health {

class GroupState;

struct Record {
  std::string event;  // "rank_failed", "stalled", ...
  std::string message;
  std::map<std::string, std::string> fields;
  std::weak_ptr<const GroupState> group;  // of the rank that logs
};

// One for each process. Thread-safe. The first record starts a reader, which ends when it has taken
// all records. So no thread waits for records.
class LogQueue {
 public:
  static LogQueue& instance();

  // `start` starts a reader, which calls take() until take() returns nullopt, and returns whether
  // it could start. Any thread may call `start`, which must not wait. With nullptr, no further
  // reader starts.
  void set_reader(std::function<bool()> start);

  // Does not wait. Drops the record if 1000 records wait: there may be no reader.
  void add(Record record);

  // The oldest record. nullopt if there is none: the reader must end.
  std::optional<Record> take();

 private:
  std::mutex mutex_;  // guards the following
  std::deque<Record> records_;
  std::function<bool()> start_;
  bool is_read_ = false;
};

}  // namespace ddpx::health
