// One operation over shared memory, as torch sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "../comm/end_notice.h"

namespace ddpx {

// Its tensors live until it has ended. `results` are what the operation writes: the outputs, or
// memory in their stead from which end() copies. Whoever runs the operation calls end(), once,
// before the operation counts as done anywhere else. Thread-safe. The members of c10d::Work that
// say whether it has ended are set in one critical section with `future_` and `at_end_`.
class ShmWork final : public c10d::Work, public GivesEndNotice {
 public:
  // How a thread waits for the end; it may carry the operation out. Throws nothing of its errors.
  using Wait = std::function<void()>;
  using WaitFor = std::function<bool(std::chrono::milliseconds)>;  // false if time ran out

  ShmWork(
      int rank,
      c10d::OpType type,
      const char* title,
      std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> results,
      uint64_t sequence);

  // From when the operation has been submitted; not called if it has ended by then.
  void submitted(Wait wait, WaitFor wait_for);

  // An exception that comes up meanwhile, as in copying results, is the work's error.
  void end(std::exception_ptr error) noexcept;

  void notify_at_end(std::function<void()> callback) override;

  const std::vector<at::Tensor>& results() const {
    return results_;
  }

  // Without lending a hand.
  void wait_until_ended();
  bool wait_until_ended(std::chrono::milliseconds timeout);  // false if time ran out

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override;

  // Of the list of outputs. Its callbacks run on a thread of torch's, where they may wait for
  // further operations.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void copy_results() const;
  void complete_elsewhere(c10::intrusive_ptr<c10::ivalue::Future> future);
  void complete(c10::ivalue::Future& future) const noexcept;

  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> results_;
  uint64_t sequence_;
  Wait wait_;
  WaitFor wait_for_;
  std::function<void()> at_end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when it is asked for
};

// Errors of the transport as torch's DistBackendError, which scripts catch. The error itself if
// there is no memory for another one.
std::exception_ptr as_torch_error(std::exception_ptr error) noexcept;

}  // namespace ddpx
