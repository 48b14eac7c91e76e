// The queue of submitted operations, and the threads that run them.
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

#include "team.h"

namespace ddpx::shm {

// Called once at the end of the operation, before its handle is done. It runs on the thread that
// ran the operation: the queue's own thread, or a thread in `wait` or `run`. It may fail the group,
// but must not submit to it or wait for it.
using Completion = std::function<void(std::exception_ptr)>;

class OperationQueue;

// The handle of a submitted operation. The caller of `submit` owns it, and may keep it longer than
// the group. Thread-safe; the queue's mutex guards its state.
class OperationHandle {
 public:
  // Null while the operation is pending, and after a success.
  std::exception_ptr error() const;

  // Waits for the end. Runs the operation, and pending ones before it, on the calling thread unless
  // another thread does. Throws the error of the operation.
  void wait();

  // Waits without running operations. Returns false if the operation is pending after the timeout.
  bool wait_for(std::chrono::milliseconds timeout) const;

 private:
  friend class OperationQueue;

  struct State;

  OperationHandle(std::shared_ptr<OperationQueue> queue, std::shared_ptr<State> state)
      : queue_(std::move(queue)), state_(std::move(state)) {}

  std::shared_ptr<OperationQueue> queue_;
  std::shared_ptr<State> state_;
};

// The operations of one rank in one group. The group and all operation handles share its ownership.
// Thread-safe; no lock is needed, and the callee takes `mutex_`. One thread at a time runs
// operations: the queue's own thread, which the first `submit` starts, or a thread that waits for
// an operation.
class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  explicit OperationQueue(std::unique_ptr<Team> team) : team_(std::move(team)) {}

  OperationHandle submit(Call call, Completion completion);
  void run(Call call, Completion completion);

  // Fails the group on all local ranks; see Steps. If the queue is closed, returns the failure as
  // an error without recording it.
  Error fail(const Failure& failure, const std::string& phase);

  // See Steps. Returns the exception itself if the queue is closed.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept;

  // Returns nullopt if the queue is closed. Does not wait for a running operation.
  std::optional<Error> failure(const std::string& phase);

  // Ends all pending operations with kAborted, and joins the thread. Later `submit` and `run`
  // throw.
  void close();

  // Keeps the queue alive for the rest of the process. For a forked child, which has neither the
  // thread nor the peers of its parent.
  void leak();

 private:
  friend class OperationHandle;

  using StatePtr = std::shared_ptr<OperationHandle::State>;
  using Lock = std::unique_lock<std::mutex>;

  StatePtr enqueue(Call call, Completion completion, bool needs_thread);
  void run_until_done(const StatePtr& state);
  void run_first(Lock& lock);
  void finish(const StatePtr& state, std::exception_ptr error, Lock& lock);
  void run_thread();

  std::mutex mutex_;                    // guards all members
  std::condition_variable work_added_;  // awaited by the queue's own thread
  std::condition_variable ended_;       // awaited by threads that wait for an operation
  std::unique_ptr<Team> team_;          // execution needs `busy_`; posting needs `mutex_`
  std::deque<StatePtr> pending_;        // the first operation may be running
  bool busy_ = false;                   // a thread runs the first operation
  bool closed_ = false;
  uint64_t next_sequence_ = 0;
  std::thread thread_;
};

}  // namespace ddpx::shm
