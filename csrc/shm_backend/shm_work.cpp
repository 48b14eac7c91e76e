#include "shm_work.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "../comm/different_calls.h"
#include "../shm/error.h"

namespace ddpx {

ShmWork::ShmWork(
    int rank,
    c10d::OpType type,
    const char* title,
    std::vector<at::Tensor> inputs,
    std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> results,
    uint64_t sequence)
    : Work(rank, type, title, inputs),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      results_(std::move(results)),
      sequence_(sequence) {}

void ShmWork::copy_results() const {
  const c10::InferenceMode inference;  // outputs may be inference tensors
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (!results_[i].is_same(outputs_[i])) {
      outputs_[i].copy_(results_[i]);
    }
  }
}

void ShmWork::end(std::exception_ptr error) noexcept {
  try {
    if (!error) {
      copy_results();
    }
    if (recordFunctionEndCallback_) {
      std::exchange(recordFunctionEndCallback_, {})();
    }
  } catch (...) {
    error = error ? error : std::current_exception();
  }
  error = as_torch_error(std::move(error));
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::function<void()> at_end;
  {
    // One critical section decides which thread completes the future: this thread if the future
    // exists, else the thread in getFuture(). Work::finish() cannot be used, since it releases the
    // lock before `future_` can be read.
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
    exception_ = std::move(error);
    future = future_;
    at_end = std::exchange(at_end_, {});
  }
  cv_.notify_all();
  if (at_end) {
    at_end();
  }
  if (future) {
    complete_in_pool(std::move(future));
  }
}

// A callback of the future may wait for another operation. It must therefore not block the thread
// that runs operations.
void ShmWork::complete_in_pool(c10::intrusive_ptr<c10::ivalue::Future> future) {
  try {
    at::launch([self = c10::intrusive_ptr<ShmWork>::reclaim_copy(this), future] {
      self->complete(*future);
    });
  } catch (...) {
    complete(*future);  // no memory for the launch; an incomplete future would block its waiters
  }
}

void ShmWork::notify_at_end(std::function<void()> callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!completed_) {
      at_end_ = std::move(callback);
      return;
    }
  }
  callback();
}

// Returns false after the timeout. Throws no error of the operation.
bool ShmWork::await_end(std::chrono::milliseconds timeout) {
  if (handle_ && timeout != kNoTimeout) {
    return handle_->wait_for(timeout);
  }
  if (handle_) {
    try {
      handle_->wait();
    } catch (...) {
      // wait() throws this error, translated for torch.
    }
    return true;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_ended = [this] { return completed_; };
  if (timeout != kNoTimeout) {
    return cv_.wait_for(lock, timeout, has_ended);
  }
  cv_.wait(lock, has_ended);
  return true;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!await_end(timeout)) {
    throw c10::DistBackendError(
        {__func__, __FILE__, __LINE__},
        "[ddpx shm] wait() timed out after " + std::to_string(timeout.count()) +
            " ms. The operation is still running. Wait again, or pass a longer timeout.");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

std::vector<at::Tensor> ShmWork::result() {
  return outputs_;
}

uint64_t ShmWork::getSequencenumber() const {
  return sequence_;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_) {
      return future_;
    }
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (!completed_) {
      return future;
    }
  }
  complete(*future);
  return future;
}

void ShmWork::complete(c10::ivalue::Future& future) const noexcept {
  try {
    if (const auto error = exception()) {
      future.setErrorIfNeeded(error);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  } catch (...) {
    // There is no memory for the value, or a callback has thrown after the future was completed.
    if (!future.completed()) {
      future.setErrorIfNeeded(std::current_exception());
    }
  }
}

std::exception_ptr as_torch_error(std::exception_ptr error) noexcept {
  if (!error) {
    return error;
  }
  try {
    std::rethrow_exception(error);
  } catch (const shm::Error& cause) {
    try {
      const c10::SourceLocation here{__func__, __FILE__, __LINE__};
      if (cause.kind() == shm::ErrorKind::kMismatch) {
        return std::make_exception_ptr(
            DifferentCalls(here, cause.what(), shm::without_opening(cause.what())));
      }
      return std::make_exception_ptr(c10::DistBackendError(here, cause.what()));
    } catch (...) {
      return error;  // no memory for another error
    }
  } catch (...) {
    return error;
  }
}

}  // namespace ddpx
