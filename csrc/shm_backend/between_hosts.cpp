#include "between_hosts.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <new>
#include <utility>

#include "../shm/error.h"

namespace ddpx {
namespace {

// Poll interval of a leader for failures of other hosts.
constexpr auto kPeriod = std::chrono::milliseconds(200);

// Time limit for answers to a query: several poll intervals, and a slow store.
constexpr auto kQueryTime = std::chrono::seconds(2);

// Added to the timeouts of later parts of an all-reduce. The part with the missing rank then times
// out first, and its error names that rank.
constexpr auto kForOtherHosts = std::chrono::seconds(5);
constexpr auto kForLeader = std::chrono::seconds(10);

// Time for which close() waits for a store that does not answer.
constexpr auto kCloseTime = std::chrono::seconds(2);

// Signals the end of a work.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
};

shm::Error destroyed() {
  return shm::Error(shm::ErrorKind::kAborted, "[ddpx shm] the process group was destroyed");
}

}  // namespace

BetweenHosts::BetweenHosts(
    std::shared_ptr<shm::Group> local, const c10::intrusive_ptr<c10d::Store>& store, int rank)
    : local_(std::move(local)), bulletin_(store), rank_(rank) {
  for (const auto& host : local_->topology().hosts) {
    leader_ranks_.push_back(host.front());
  }
}

void BetweenHosts::close() {
  Lock lock(mutex_);
  closed_ = true;
  lock.unlock();
  changed_.notify_all();
  local_->leave();  // ends a wait of the thread for peers
  lock.lock();
  const bool ended = changed_.wait_for(lock, kCloseTime, [this] { return num_threads_ == 0; });
  lock.unlock();
  for (auto* thread : {&watcher_, &thread_}) {
    if (thread->joinable()) {
      ended ? thread->join() : thread->detach();
    }
  }
}

void BetweenHosts::start(std::thread& thread, void (BetweenHosts::*body)(), const Lock&) {
  thread = std::thread([self = shared_from_this(), body] {
    (self.get()->*body)();
    const Lock lock(self->mutex_);
    --self->num_threads_;
    self->changed_.notify_all();
  });
  ++num_threads_;
}

void BetweenHosts::set_leaders(c10::intrusive_ptr<c10d::Backend> leaders) {
  leaders_ = std::move(leaders);
  start(watcher_, &BetweenHosts::watch, Lock(mutex_));
}

void BetweenHosts::submit(AllReduce operation) {
  auto* raw = operation.work.get();
  operation.work->set_waits(
      [raw] { raw->wait_until_ended(); },
      [raw](std::chrono::milliseconds timeout) { return raw->wait_until_ended(timeout); });
  {
    const Lock lock(mutex_);
    if (!thread_.joinable()) {
      start(thread_, &BetweenHosts::work, lock);
    }
    pending_.push_back(std::move(operation));
  }
  changed_.notify_all();
}

void BetweenHosts::fail(const std::string& reason) {
  publish(reason);
}

void BetweenHosts::fail_with(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    try {
      publish(shm::without_opening(cause.what()));
    } catch (...) {
      // There is no memory for the text. Other hosts time out.
    }
  } catch (...) {
  }
}

void BetweenHosts::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
    if (pending_.empty()) {
      return;
    }
    const auto operation = std::move(pending_.front());
    pending_.pop_front();
    lock.unlock();
    operation.work->end(error_of(operation));
    lock.lock();
  }
}

// Runs an all-reduce. Returns null on success.
std::exception_ptr BetweenHosts::error_of(const AllReduce& operation) noexcept {
  try {
    throw_failure();
    carry_out(operation);
    return nullptr;
  } catch (const shm::Error&) {
    return std::current_exception();
  } catch (...) {
    // The group must fail: peers would otherwise match the parts of the next all-reduce with the
    // remaining parts of this all-reduce.
    const auto error = local_->fail_with_current_exception("all_reduce between hosts");
    fail_with(error);
    return error;
  }
}

void BetweenHosts::throw_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) {
    throw shm::Error(
        shm::ErrorKind::kPeerLost, shm::opening(rank_, "all_reduce between hosts") + *failure_);
  }
  if (closed_) {
    throw destroyed();
  }
}

void BetweenHosts::carry_out(const AllReduce& operation) {
  auto within = operation.call;
  if (within.op == shm::ReduceOp::kAvg) {
    within.op = shm::ReduceOp::kSum;
  }
  auto back = shm::broadcast_call(within.output, within.count, within.dtype, /*root=*/0);
  back.timeout = within.timeout + kForOtherHosts + kForLeader;
  try {
    local_->run(within);
    if (leaders_) {
      reduce_among_leaders(operation);
    }
    local_->run(back);
  } catch (const std::exception& error) {
    publish(error.what());
    throw;
  }
}

void BetweenHosts::reduce_among_leaders(const AllReduce& operation) {
  const bool average = operation.call.op == shm::ReduceOp::kAvg;
  const at::NoGradGuard no_grad;
  const auto& tensor = operation.tensor;
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation.op;
  options.timeout = operation.call.timeout + kForOtherHosts;
  ++num_begun_;
  try {
    await(*leaders_->allreduce(tensors, options));
  } catch (const shm::Error&) {
    throw;
  } catch (const std::exception& error) {
    query_leaders(error.what());
    throw_failure();
    throw;
  }
  if (average) {
    tensors[0].div_(static_cast<int64_t>(local_->topology().size()));
  }
}

// Waits for the end of the work. Throws if the second thread has read a failure of another host.
void BetweenHosts::await(c10d::Work& work) {
  const auto signal = std::make_shared<Signal>();
  work.getFuture()->addCallback([signal](c10::ivalue::Future&) {
    {
      const std::lock_guard<std::mutex> lock(signal->mutex);
      signal->ended = true;
    }
    signal->changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(signal->mutex);
  while (!signal->changed.wait_for(lock, kPeriod, [&] { return signal->ended; })) {
    throw_failure();
  }
  lock.unlock();
  work.wait();
}

// Body of a leader's second thread.
void BetweenHosts::watch() {
  try {
    watch_until_failure();
  } catch (...) {
    fail_with(local_->fail_with_current_exception("looking for failures of other hosts"));
  }
}

void BetweenHosts::watch_until_failure() {
  const auto ended = [this] { return closed_ || failure_; };
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, ended)) {
    lock.unlock();
    std::optional<std::string> failure;
    try {
      failure = bulletin_.failure();
      if (!failure && bulletin_.query_started()) {
        bulletin_.answer(rank_, num_begun_);
      }
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception&) {
      // The store is gone. If its rank has died, the connection of gloo fails, too.
      return;
    }
    if (failure) {
      publish(*failure);
      return;
    }
    lock.lock();
  }
  const auto failure = failure_;
  lock.unlock();
  try {
    if (failure) {
      bulletin_.post(*failure);  // after an abort, other hosts do not know the failure
    }
  } catch (const std::exception&) {
    // The store is gone. Other hosts time out.
  }
}

// Fails the group on all hosts. Only the first failure is kept. Returns that failure.
std::string BetweenHosts::publish(const std::string& failure) {
  std::string standing = failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      return *failure_;
    }
  }
  try {
    standing = bulletin_.post(failure);
  } catch (const std::exception&) {
    // The store is gone. The connections of gloo on other hosts fail or time out.
  }
  end_with(standing);
  local_->abort(standing);
  return standing;
}

void BetweenHosts::abort(const std::string& reason) {
  end_with(shm::list_ranks({rank_}) + " aborted the group: " + reason);
  local_->abort(reason);
}

// Ends all operations with this failure, unless there is an earlier one.
void BetweenHosts::end_with(const std::string& failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure_.value_or(failure);
  }
  changed_.notify_all();
}

// The errors of gloo name no rank, so every leader publishes how far it has come.
std::string BetweenHosts::query_leaders(const std::string& cause) {
  const auto deadline = std::chrono::steady_clock::now() + kQueryTime;
  try {
    bulletin_.start_query();
    while (true) {
      const bool last = std::chrono::steady_clock::now() >= deadline;
      if (const auto failure = evaluate_answers(cause, last)) {
        return publish(*failure);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  } catch (const std::exception& error) {
    return publish(
        "the all-reduce between hosts failed, and the store does not answer either: the process "
        "that runs it, usually rank 0's, has probably died. See the output of rank 0. Between "
        "hosts: " +
        cause + ". Store: " + error.what());
  }
}

// Returns nullopt while leaders may still answer, except for the last attempt.
std::optional<std::string> BetweenHosts::evaluate_answers(const std::string& cause, bool last) {
  if (const auto failure = bulletin_.failure()) {
    return failure;
  }
  std::vector<int> silent;
  std::vector<int> behind;
  for (const int leader : leader_ranks_) {
    if (leader == rank_) {
      continue;
    }
    const auto num_begun = bulletin_.answer_of(leader);
    if (!num_begun) {
      silent.push_back(leader);
    } else if (*num_begun < num_begun_) {
      behind.push_back(leader);
    }
  }
  if (!silent.empty() && !last) {
    return std::nullopt;
  }
  const auto opening = std::string("the all-reduce between hosts failed: ");
  if (!silent.empty()) {
    return opening + shm::list_ranks(silent) +
           " did not answer (died, most likely; each leads its host). See the output of these "
           "ranks; the group cannot go on, start the job again. gloo said: " +
           cause;
  }
  if (!behind.empty()) {
    return opening + shm::list_ranks(behind) +
           " did not come to it (each leads its host, and waits for all of its ranks). They are "
           "slower, stuck, or called fewer operations. gloo said: " +
           cause;
  }
  return opening + cause;
}

}  // namespace ddpx
