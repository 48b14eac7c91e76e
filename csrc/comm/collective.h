// The communication that a reducer needs: a process group, or a fake in tests.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>

namespace ddpx {

// Every rank makes the same calls in the same order. Called without the GIL, and without the mutex
// of the reducer where the call waits.
class Collective {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // No other rank exists: sums and broadcasts change nothing.
  virtual bool alone() const {
    return world_size() == 1;
  }

  // Launches the sum of `tensor` over all ranks, in place. `tensor` must live until the work is
  // done.
  virtual Work all_reduce_sum(const at::Tensor& tensor) = 0;

  // Whether all_reduce_sum() is a call of the process group, which a hook of another rank may
  // match.
  virtual bool sums_by_group() const {
    return true;
  }

  // The future whose value takes the place of the summed tensor. Null if the sum is in that tensor.
  virtual c10::intrusive_ptr<c10::ivalue::Future> sum_of(c10d::Work& /*work*/) {
    return nullptr;
  }

  // Waits for the work on a tensor of `device`: on CPU until the work is done, on a device by
  // making the current stream wait. Throws the error of the work, or health::GroupFailed as soon as
  // the group has failed.
  virtual void wait(c10d::Work& work, c10::Device device);

  // As above, for the future of a sum or of a communication hook.
  virtual void wait(c10::ivalue::Future& future) const;

  // Overwrites `tensor` with the tensor of rank 0. Returns when the current stream has the result.
  virtual void broadcast_from_rank_0(const at::Tensor& tensor) = 0;

  // A flat, uninitialized tensor in the memory that the backend prefers.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options) = 0;
};

// Whether calls of the group on tensors of this device keep waiting after an abort of the group, as
// calls of gloo do. Collective::wait() then polls for a failure of the group.
bool needs_abort_polling(c10d::ProcessGroup& group, c10::DeviceType device);

// The user's code may implement a group. Its calls may do more than a sum over its ranks, such as
// averaging over replicas of the job, and a future may have another value than the tensor.
enum class WrittenIn { kCpp, kPython };

// `transport`, if any, sums strided CPU tensors in place of the group. The backend has the ranks of
// the group, and makes each work a GivesEndNotice that ends when the transport is aborted.
std::shared_ptr<Collective> make_collective(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    WrittenIn language,
    c10::intrusive_ptr<c10d::Backend> transport = nullptr);

}  // namespace ddpx
