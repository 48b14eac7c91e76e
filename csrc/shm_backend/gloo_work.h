// The c10d::Work of an operation through gloo.
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

// Wraps gloo's work. The caller owns it. Thread-safe; it needs no lock. It adds two things: errors
// of wait() name lost ranks, and the wait for a collective ends after a failure of the local group.
// The future has gloo's own errors.
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
