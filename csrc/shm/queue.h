// Operations in the order in which they were submitted, and who carries them out.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "team.h"

namespace ddpx::shm {

// Called once when the operation has ended, before its ticket says so, on the thread that carried
// it out (the queue's own, or one in `wait` or `run`). Must not call the group.
using Completion = std::function<void(std::exception_ptr)>;

class OperationQueue;

// One operation that was submitted. Thread-safe; may outlive the group.
class Ticket {
 public:
  // None while it has not ended, and if it went well.
  std::exception_ptr error() const;

  bool done() const;

  // Waits for the end; carries out the operation, and those before it, if no other thread does.
  // Throws the error that ended it.
  void wait();

  // Leaves the work to others. False if it has not ended in time.
  bool wait_for(std::chrono::milliseconds timeout) const;

 private:
  friend class OperationQueue;

  struct State;

  Ticket(std::shared_ptr<OperationQueue> queue, std::shared_ptr<State> state)
      : queue_(std::move(queue)), state_(std::move(state)) {}

  std::shared_ptr<OperationQueue> queue_;
  std::shared_ptr<State> state_;
};

// Thread-safe. One thread at a time carries operations out: the queue's own, which the first
// `submit` starts, or one that waits for an operation.
class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  explicit OperationQueue(std::unique_ptr<Team> team) : team_(std::move(team)) {}

  Ticket submit(Call call, Completion completion);
  void run(Call call, Completion completion);

  // For all local ranks; the first failure stands. Returns the error of this rank.
  Error fail(const Failure& failure, const std::string& phase);

  // See Steps. The exception itself once the queue is closed.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept;

  // Nothing once it is closed. These do not wait for an operation that is under way.
  std::optional<Error> failure(const std::string& phase);
  std::vector<Loss> losses();

  // Ends what has not ended with an error, and the thread. Nothing can be submitted afterwards.
  void close();

  // In a forked child, where neither the thread nor the peers are this process's.
  void abandon();

 private:
  friend class Ticket;

  using StatePtr = std::shared_ptr<Ticket::State>;
  using Lock = std::unique_lock<std::mutex>;

  StatePtr enqueue(Call call, Completion completion, bool needs_thread, const Lock& lock);
  void drive_until_done(const StatePtr& state);
  void carry_out_first(Lock& lock);
  void end(const StatePtr& state, std::exception_ptr error, Lock& lock);
  void work();

  std::mutex mutex_;
  std::condition_variable work_;   // the thread waits for operations
  std::condition_variable ended_;  // others wait for the end of one
  std::unique_ptr<Team> team_;     // used by whoever has set `busy_`, and to post
  std::deque<StatePtr> pending_;   // the first may be under way
  bool busy_ = false;              // a thread carries out the first
  bool closed_ = false;
  uint64_t next_sequence_ = 0;
  std::thread thread_;
};

}  // namespace ddpx::shm
