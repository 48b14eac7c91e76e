// A process group that sums on a stream of its own, as NCCL does, through gloo.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

#include "streams.h"

namespace late {

// Calls return before anything is sent. Nothing is held on the stream of the collectives, so that a
// buffer is sent too early unless its packing is waited for. The stream of the collectives, one of
// each device, waits for the caller's stream; Work::wait() makes the current stream wait, and
// blocks the host only if it is given a timeout. gloo sums in place, in device memory, so that the
// sums have gloo's bits. What gloo throws comes out of the next wait of the host, as with every
// task.
class LateBackend final : public c10d::Backend {
 public:
  // One group of gloo's for each device: its calls pair up in the order of one stream.
  LateBackend(int rank, int size, std::vector<c10::intrusive_ptr<c10d::Backend>> gloo);

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
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  using Call = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;

  c10::intrusive_ptr<c10d::Work> queue(
      const char* name, c10d::OpType type, const std::vector<at::Tensor>& tensors, Call call);

  std::vector<c10::intrusive_ptr<c10d::Backend>> gloo_;
  std::vector<c10::Stream> streams_;  // by device
  uint64_t num_calls_ = 0;
};

}  // namespace late
