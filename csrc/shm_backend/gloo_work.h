// The c10d::Work of an operation through gloo.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../health_c10d/watched_backend.h"
#include "../shm/group.h"

namespace ddpx {

// An operation through gloo, whose errors name neither ranks nor the operation. Owned by its work.
// Thread-safe; it needs no lock.
struct GlooCall {
  const char* name;
  bool collective;  // needs all ranks
  int rank;
  std::weak_ptr<shm::Group> group;  // weak: a work must not keep a group that is destroyed
  c10::weak_intrusive_ptr<WatchedBackend> backend;

  // The error to raise for an error of gloo. The failure detector names lost ranks if it watches
  // over the group. A collective that fails also fails the group: other ranks may wait for this
  // one.
  std::exception_ptr explain(const std::exception_ptr& error) const;

  // The failure of the group as an error of torch; null if the group has not failed.
  std::exception_ptr failure() const;

 private:
  std::string name_of_rank() const;
  std::string phase() const;
};

// Wraps gloo's work. The caller owns it. Thread-safe; it needs no lock. It adds two things: errors
// of wait() are explained, and the wait for a collective ends after a failure of the group. The
// future has gloo's own errors.
class GlooWork final : public c10d::Work {
 public:
  GlooWork(c10::intrusive_ptr<c10d::Work> inner, GlooCall call);

  bool wait(std::chrono::milliseconds timeout) override;

  // As of gloo's work.
  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return inner_->result();
  }
  void synchronize() override {
    inner_->synchronize();
  }
  void blockCurrentStream() override {
    inner_->blockCurrentStream();
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner_->getFuture();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }
  float getDuration() const override {
    return inner_->getDuration();
  }
  uint64_t getSequencenumber() const override {
    return inner_->getSequencenumber();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void await_end(Clock::time_point deadline);
  bool wait_until(Clock::time_point deadline);

  c10::intrusive_ptr<c10d::Work> inner_;
  GlooCall call_;
};

}  // namespace ddpx
