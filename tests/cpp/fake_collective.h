// A collective whose all-reduces the test completes by hand, in any order, or lets fail.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective.h"

namespace ddpx {

class FakeWork final : public c10d::Work {
 public:
  explicit FakeWork(std::function<void()> on_wait) : on_wait_(std::move(on_wait)) {}

  void complete() {
    finish();
  }

  void fail(const std::string& cause) {
    finish(std::make_exception_ptr(std::runtime_error(cause)));
  }

  bool wait(std::chrono::milliseconds) override {
    on_wait_();
    if (!isCompleted()) {
      // A backend would hang here.
      throw std::runtime_error("waited for an all-reduce that the test never completes");
    }
    if (exception_) {
      std::rethrow_exception(exception_);
    }
    return true;
  }

 private:
  std::function<void()> on_wait_;
};

// One rank of `world_size`; the others exist only as what they send. The handlers run inside a call
// of the reducer, without its mutex: they may look at the reducer, but not change it.
class FakeCollective final : public Collective {
 public:
  struct AllReduce {
    at::Tensor tensor;
    c10::intrusive_ptr<FakeWork> work;
  };

  FakeCollective(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

  // What `peer` sends where this rank sends `own`. By default each rank sends (its rank + 1) times
  // what rank 0 does, so that a gradient's mean is no rank's own.
  std::function<at::Tensor(const at::Tensor& own, int peer)> peer_sends =
      [this](const at::Tensor& own, int peer) { return own * (peer + 1) / (rank_ + 1); };

  // Called with the index of the all-reduce once it is launched, and each time it is waited for.
  std::function<void(std::size_t)> on_launch = [](std::size_t) {};
  std::function<void(std::size_t)> on_wait = [this](std::size_t index) { complete(index); };

  // Rank 0's tensor for a broadcast; by default what this rank has.
  std::function<void(const at::Tensor&)> on_broadcast = [](const at::Tensor&) {};

  // Called before memory for a bucket is allocated; may throw.
  std::function<void()> on_allocate = [] {};

  // What happened, in order: "launch 0", "wait 0", "broadcast", and what a test adds.
  std::vector<std::string> log;

  const std::vector<AllReduce>& all_reduces() const {
    return all_reduces_;
  }

  // Forgets what happened; the next all-reduce is number 0 again.
  void clear() {
    all_reduces_.clear();
    log.clear();
  }

  // Nothing if it is complete already.
  void complete(std::size_t index) {
    const auto& [tensor, work] = all_reduces_.at(index);
    if (work->isCompleted()) {
      return;
    }
    const auto own = tensor.clone();
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer != rank_) {
        tensor.add_(peer_sends(own, peer).to(tensor.scalar_type()));
      }
    }
    work->complete();
  }

  void fail(std::size_t index, const std::string& cause) {
    all_reduces_.at(index).work->fail(cause);
  }

  int rank() const override {
    return rank_;
  }

  int world_size() const override {
    return world_size_;
  }

  Work all_reduce_sum(const at::Tensor& tensor) override {
    const auto index = all_reduces_.size();
    log.push_back("launch " + std::to_string(index));
    auto work = c10::make_intrusive<FakeWork>([this, index] {
      log.push_back("wait " + std::to_string(index));
      on_wait(index);
    });
    all_reduces_.push_back({tensor, work});
    on_launch(index);
    return work;
  }

  void broadcast_from_rank_0(const at::Tensor& tensor) override {
    log.push_back("broadcast");
    on_broadcast(tensor);
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    on_allocate();
    // Not numbers, so that what is sent without having been packed shows.
    auto tensor = at::full({numel}, std::numeric_limits<double>::quiet_NaN(), options);
    allocated_.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  }

  // The number of tensors of allocate() that are in use.
  std::size_t num_allocated() const {
    std::size_t number = 0;
    for (const auto& storage : allocated_) {
      number += storage.expired() ? 0 : 1;
    }
    return number;
  }

 private:
  int rank_;
  int world_size_;
  std::vector<AllReduce> all_reduces_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> allocated_;
};

}  // namespace ddpx
