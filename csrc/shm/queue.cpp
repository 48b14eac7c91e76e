#include "queue.h"

#include <vector>

#include "error.h"

namespace ddpx::shm {

namespace {

std::exception_ptr destroyed_error() noexcept {
  try {
    return std::make_exception_ptr(Error(
        ErrorKind::kAborted,
        "[ddpx shm] the process group was destroyed before this operation ran. Wait for all "
        "operations before you destroy the group."));
  } catch (...) {
    return std::current_exception();  // no memory for the text; the operation fails all the same
  }
}

}  // namespace

// The queue's mutex guards all members except `call` and `sequence`, which do not change.
struct OperationHandle::State {
  Call call;
  uint64_t sequence = 0;
  Completion completion;
  bool posted = false;
  bool done = false;
  std::exception_ptr error;
};

std::exception_ptr OperationHandle::error() const {
  const std::lock_guard<std::mutex> lock(queue_->mutex_);
  return state_->error;
}

void OperationHandle::wait() {
  queue_->run_until_done(state_);
  if (const auto cause = error()) {
    std::rethrow_exception(cause);
  }
}

bool OperationHandle::wait_for(std::chrono::milliseconds timeout) const {
  OperationQueue::Lock lock(queue_->mutex_);
  return queue_->ended_.wait_for(lock, timeout, [this] { return state_->done; });
}

OperationQueue::StatePtr OperationQueue::enqueue(
    Call call, Completion completion, bool needs_thread) {
  const Lock lock(mutex_);
  if (closed_) {
    throw Error(
        ErrorKind::kAborted,
        "[ddpx shm] an operation was called on a destroyed process group. Call it before you "
        "destroy the group, or make a new group.");
  }
  check_call(call, team_->size());
  StatePtr state;
  try {
    if (needs_thread && !thread_.joinable()) {
      thread_ = std::thread([this] { run_thread(); });
    }
    state = std::make_shared<OperationHandle::State>();
    pending_.push_back(state);
  } catch (...) {
    // Otherwise peers would wait for this call, or match it with this rank's next call.
    std::rethrow_exception(team_->steps().fail_with_current_exception(name_of(call.kind)));
  }
  state->call = std::move(call);
  state->completion = std::move(completion);
  state->sequence = next_sequence_++;
  // Posting here spares peers the wake-up time of this rank's thread. Only the first operation of
  // the queue may be posted: later ones may use buffers of the operations before them.
  if (pending_.size() == 1) {
    team_->post(state->call, state->sequence);
    state->posted = true;
  }
  return state;
}

OperationHandle OperationQueue::submit(Call call, Completion completion) {
  auto state = enqueue(std::move(call), std::move(completion), /*needs_thread=*/true);
  work_added_.notify_one();
  return OperationHandle(shared_from_this(), std::move(state));
}

void OperationQueue::run(Call call, Completion completion) {
  const auto state = enqueue(std::move(call), std::move(completion), /*needs_thread=*/false);
  run_until_done(state);
  if (state->error) {
    std::rethrow_exception(state->error);
  }
}

void OperationQueue::run_until_done(const StatePtr& state) {
  Lock lock(mutex_);
  while (!state->done) {
    if (!busy_ && !pending_.empty()) {
      run_first(lock);
    } else {
      ended_.wait(lock);
    }
  }
}

// Body of the queue's own thread.
void OperationQueue::run_thread() {
  Lock lock(mutex_);
  while (!closed_) {
    if (!busy_ && !pending_.empty()) {
      run_first(lock);
    } else {
      work_added_.wait(lock);
    }
  }
}

void OperationQueue::run_first(Lock& lock) {
  busy_ = true;
  const auto state = pending_.front();
  if (!state->posted) {
    team_->post(state->call, state->sequence);
    state->posted = true;
  }
  lock.unlock();
  std::exception_ptr error;
  try {
    team_->execute(state->call);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  finish(state, std::move(error), lock);
  // `busy_` stays set until the completion has run, so that completions run in order, too.
  pending_.pop_front();
  busy_ = false;
  if (!pending_.empty()) {
    work_added_.notify_one();
  }
  ended_.notify_all();
}

void OperationQueue::finish(const StatePtr& state, std::exception_ptr error, Lock& lock) {
  if (state->completion) {
    lock.unlock();
    try {
      state->completion(error);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
    state->completion = {};
    lock.lock();
  }
  state->error = std::move(error);
  state->done = true;
}

Error OperationQueue::fail(const Failure& failure, const std::string& phase) {
  const Lock lock(mutex_);
  if (closed_) {
    return Error(failure.kind, "[ddpx shm] " + failure.text, failure.culprit);
  }
  return team_->steps().fail(failure, phase);
}

std::exception_ptr OperationQueue::fail_with_current_exception(const char* phase) noexcept {
  const Lock lock(mutex_);
  return closed_ ? std::current_exception() : team_->steps().fail_with_current_exception(phase);
}

std::optional<Error> OperationQueue::failure(const std::string& phase) {
  const Lock lock(mutex_);
  return closed_ ? std::nullopt : team_->steps().failure(phase);
}

void OperationQueue::close() {
  Lock lock(mutex_);
  if (closed_) {
    return;
  }
  closed_ = true;
  team_->steps().cancel();
  ended_.wait(lock, [this] { return !busy_; });
  busy_ = true;  // waiting threads must not run a pending operation while a completion runs
  const auto cause = destroyed_error();
  while (!pending_.empty()) {
    finish(pending_.front(), cause, lock);
    pending_.pop_front();
  }
  busy_ = false;
  work_added_.notify_all();
  ended_.notify_all();
  lock.unlock();
  if (thread_.joinable()) {
    thread_.join();
  }
  team_->leave();
  lock.lock();
  team_.reset();
}

void OperationQueue::leak() {
  // At the fork, the thread of the parent may have held the mutex or waited on a condition. The
  // child can therefore neither use nor destroy them.
  static auto* leaked = new std::vector<std::shared_ptr<OperationQueue>>;
  leaked->push_back(shared_from_this());
}

}  // namespace ddpx::shm
