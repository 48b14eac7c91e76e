// A backend of torch.distributed for tensors of the late device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <mutex>
#include <vector>

#include "streams.h"

namespace late {

// As NCCL's: a collective runs on a stream of its own, behind what is in the current stream; wait()
// makes the current stream wait, and not the host. Sums are those of the `inner` gloo backend.
class LateBackend final : public c10d::Backend {
 public:
  LateBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner);

  const std::string getBackendName() const override {
    return "late";
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return num_calls_;
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  // Runs `call`, which blocks, on the communication stream of the tensors' device.
  c10::intrusive_ptr<c10d::Work> start(
      c10d::OpType type, const std::vector<at::Tensor>& tensors, std::function<void()> call);
  c10::Stream stream_for(c10::DeviceIndex device);

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  Point last_;  // of the collectives
  uint64_t num_calls_ = 0;
};

}  // namespace late
