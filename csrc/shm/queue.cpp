#include "queue.h"

#include <vector>

#include "error.h"

namespace ddpx::shm {

namespace {

std::exception_ptr destroyed() noexcept {
  try {
    return std::make_exception_ptr(Error(
        ErrorKind::kAborted, "[ddpx shm] the process group was destroyed before this operation"));
  } catch (...) {
    return std::current_exception();  // no memory for the text; any error will do
  }
}

}  // namespace

// Guarded by the queue's mutex, but for `call` and `sequence`, which do not change.
struct Ticket::State {
  Call call;
  uint64_t sequence = 0;
  Completion completion;
  bool posted = false;
  bool done = false;
  std::exception_ptr error;
};

bool Ticket::done() const {
  const std::lock_guard<std::mutex> lock(queue_->mutex_);
  return state_->done;
}

std::exception_ptr Ticket::error() const {
  const std::lock_guard<std::mutex> lock(queue_->mutex_);
  return state_->error;
}

void Ticket::wait() {
  queue_->drive_until_done(state_);
  if (const auto cause = error()) {
    std::rethrow_exception(cause);
  }
}

bool Ticket::wait_for(std::chrono::milliseconds timeout) const {
  OperationQueue::Lock lock(queue_->mutex_);
  return queue_->ended_.wait_for(lock, timeout, [this] { return state_->done; });
}

OperationQueue::StatePtr OperationQueue::enqueue(
    Call call, Completion completion, bool needs_thread, const Lock&) {
  if (closed_) {
    throw Error(
        ErrorKind::kAborted, "[ddpx shm] an operation was called on a group that is destroyed");
  }
  check_call(call, team_->size());
  StatePtr state;
  try {
    if (needs_thread && !thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
    state = std::make_shared<Ticket::State>();
    pending_.push_back(state);
  } catch (...) {
    // Peers would wait for this call, or take this rank's next one for it.
    std::rethrow_exception(team_->steps().fail_with_current_exception(name_of(call.kind)));
  }
  state->call = std::move(call);
  state->completion = std::move(completion);
  state->sequence = next_sequence_++;
  // Peers need not wait for this rank's thread to wake up. Only the first in the queue: the others
  // may use buffers that the ones before them still work on.
  if (pending_.size() == 1) {
    team_->post(state->call, state->sequence);
    state->posted = true;
  }
  return state;
}

Ticket OperationQueue::submit(Call call, Completion completion) {
  StatePtr state;
  {
    const Lock lock(mutex_);
    state = enqueue(std::move(call), std::move(completion), /*needs_thread=*/true, lock);
  }
  work_.notify_one();
  return Ticket(shared_from_this(), std::move(state));
}

void OperationQueue::run(Call call, Completion completion) {
  StatePtr state;
  {
    const Lock lock(mutex_);
    state = enqueue(std::move(call), std::move(completion), /*needs_thread=*/false, lock);
  }
  drive_until_done(state);
  if (state->error) {
    std::rethrow_exception(state->error);
  }
}

void OperationQueue::drive_until_done(const StatePtr& state) {
  Lock lock(mutex_);
  while (!state->done) {
    if (!busy_ && !pending_.empty()) {
      carry_out_first(lock);
    } else {
      ended_.wait(lock);
    }
  }
}

void OperationQueue::work() {
  Lock lock(mutex_);
  while (!closed_) {
    if (!busy_ && !pending_.empty()) {
      carry_out_first(lock);
    } else {
      work_.wait(lock);
    }
  }
}

void OperationQueue::carry_out_first(Lock& lock) {
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
  end(state, std::move(error), lock);
  // Busy until its completion has run, so that completions come in order, too.
  pending_.pop_front();
  busy_ = false;
  if (!pending_.empty()) {
    work_.notify_one();
  }
  ended_.notify_all();
}

void OperationQueue::end(const StatePtr& state, std::exception_ptr error, Lock& lock) {
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
    return Error(failure.kind, "[ddpx shm] " + failure.text, {failure.culprit});
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

std::vector<Loss> OperationQueue::losses() {
  const Lock lock(mutex_);
  return closed_ ? std::vector<Loss>() : team_->peers().losses();
}

void OperationQueue::close() {
  Lock lock(mutex_);
  if (closed_) {
    return;
  }
  closed_ = true;
  team_->steps().give_up();
  ended_.wait(lock, [this] { return !busy_; });
  busy_ = true;  // lest a thread that waits begins one of them while its completion runs
  const auto cause = destroyed();
  while (!pending_.empty()) {
    end(pending_.front(), cause, lock);
    pending_.pop_front();
  }
  busy_ = false;
  work_.notify_all();
  ended_.notify_all();
  lock.unlock();
  if (thread_.joinable()) {
    thread_.join();
  }
  team_->leave();
  lock.lock();
  team_.reset();
}

void OperationQueue::abandon() {
  // Kept for good: the thread that does not exist here may have held its locks or waited on its
  // conditions, so that they can be neither used nor destroyed.
  static auto* abandoned = new std::vector<std::shared_ptr<OperationQueue>>;
  abandoned->push_back(shared_from_this());
}

}  // namespace ddpx::shm
