// The communication that a reducer needs: a process group, or a fake in tests.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>

#include "../health/monitor.h"

namespace ddpx {

// Every rank makes the same calls in the same order. Called with the reducer's mutex held and
// without the GIL.
class Collective {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // There is nobody to communicate with: sums and broadcasts leave everything as it is.
  virtual bool alone() const {
    return world_size() == 1;
  }

  // Starts summing `tensor` over all ranks, in place. The tensor must live until the work is done.
  virtual Work all_reduce_sum(const at::Tensor& tensor) = 0;

  // Waits for the work on a tensor of `device`: on CPU until it is done, on a device by making the
  // current stream wait. Throws what the work throws, or
  // health::GroupFailed as soon as the group has failed.
  virtual void wait(c10d::Work& work, c10::Device device);

  // As wait(), for what a hook returned.
  void wait(c10::ivalue::Future& future) const;

  // Overwrites `tensor` with rank 0's; returns once that is done on this rank's current stream.
  virtual void broadcast_from_rank_0(const at::Tensor& tensor) = 0;

  // Who watches over the ranks; null if nobody does.
  virtual std::shared_ptr<health::Monitor> monitor() const {
    return nullptr;
  }

  // A flat tensor, uninitialised, in memory that the backend likes best.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options) = 0;
};

// Whether calls of the group on tensors of that device go on waiting when it is aborted, as gloo's
// do; Collective::wait() looks up from them.
bool is_deaf(c10d::ProcessGroup& group, c10::DeviceType device);

std::shared_ptr<Collective> make_collective(c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace ddpx
