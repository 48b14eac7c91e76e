// The c10d::Work of an operation over shared memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../comm/end_notice.h"
#include "../shm/queue.h"

namespace ddpx {

// One operation, from its submission to its end. The caller and the pending operation share its
// ownership. Thread-safe: `mutex_` of c10d::Work guards the state, `future_` and `at_end_`, which
// change in one critical section. The thread that runs the operation calls end() once, before the
// operation is done for any other thread. The work keeps its tensors alive. The operation writes
// `results`: the outputs themselves, or copies of them, from which end() copies back.
class ShmWork final : public c10d::Work, public GivesEndNotice {
 public:
  ShmWork(
      int rank,
      c10d::OpType type,
      const char* title,
      std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> results,
      uint64_t sequence);

  // To be called once the operation has been submitted, if wait() may run the operation.
  void set_handle(shm::OperationHandle handle) {
    handle_ = std::move(handle);
  }

  // Ends the work. An exception in end(), such as one from copying results, becomes its error.
  void end(std::exception_ptr error) noexcept;

  void notify_at_end(std::function<void()> callback) override;

  const std::vector<at::Tensor>& results() const {
    return results_;
  }

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override;

  // The future's value is the list of outputs. Its callbacks run on torch's thread pool, so they
  // may wait for other operations.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void copy_results() const;
  bool await_end(std::chrono::milliseconds timeout);
  void complete_in_pool(c10::intrusive_ptr<c10::ivalue::Future> future);
  void complete(c10::ivalue::Future& future) const noexcept;

  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> results_;
  uint64_t sequence_;
  std::optional<shm::OperationHandle> handle_;
  std::function<void()> at_end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // created by the first getFuture()
};

// Translates an error of the transport into torch's DistBackendError, which scripts catch. Returns
// the error itself if there is no memory for another error.
std::exception_ptr as_torch_error(std::exception_ptr error) noexcept;

}  // namespace ddpx
