// One operation through gloo, as torch sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <vector>

#include "gloo_faults.h"

namespace ddpx {

// gloo's work, but that errors of wait() name the ranks that are gone, and that the wait for a
// collective ends when the local group has failed. Its future has gloo's errors.
class GlooWork final : public c10d::Work {
 public:
  GlooWork(c10::intrusive_ptr<c10d::Work> inner, int rank, GlooFaults faults);

  bool wait(std::chrono::milliseconds timeout) override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  using Clock = std::chrono::steady_clock;

  void await_end(Clock::time_point deadline);
  bool wait_until(Clock::time_point deadline);

  c10::intrusive_ptr<c10d::Work> inner_;
  GlooFaults faults_;
};

}  // namespace ddpx
