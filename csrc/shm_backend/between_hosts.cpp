#include "between_hosts.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "../shm/error.h"

namespace ddpx {

BetweenHosts::~BetweenHosts() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void BetweenHosts::submit(AllReduce operation) {
  // wait() on the work of another thread: until end() has been called.
  auto* raw = operation.work.get();
  operation.work->submitted(
      [raw] { raw->wait_until_ended(); },
      [raw](std::chrono::milliseconds timeout) { return raw->wait_until_ended(timeout); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(std::move(operation));
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
  }
  changed_.notify_all();
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
    const bool closed = closed_;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (closed) {
        throw shm::Error(shm::ErrorKind::kAborted, "[ddpx shm] the process group was destroyed");
      }
      carry_out(operation);
    } catch (...) {
      error = std::current_exception();
    }
    operation.work->end(error);
    lock.lock();
  }
}

void BetweenHosts::carry_out(const AllReduce& operation) {
  const bool average = operation.call.op == shm::ReduceOp::kAvg;
  auto within = operation.call;
  if (average) {
    within.op = shm::ReduceOp::kSum;
  }
  local_->run(within);
  if (leaders_) {
    try {
      const at::NoGradGuard no_grad;
      auto real =
          operation.tensor.is_complex() ? at::view_as_real(operation.tensor) : operation.tensor;
      c10d::AllreduceOptions options;
      options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation.op;
      std::vector<at::Tensor> tensors = {real};
      leaders_->allreduce(tensors, options)->wait();
      if (average) {
        operation.tensor.div_(operation.world_size);
      }
    } catch (const std::exception& error) {
      // The others on this host wait for the leader: they hear why it does not come.
      local_->abort(std::string("the all-reduce between hosts failed: ") + error.what());
      throw;
    }
  }
  local_->run(shm::broadcast_call(within.output, within.count, within.dtype, /*root=*/0));
}

}  // namespace ddpx
