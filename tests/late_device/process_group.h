// A process group that runs collectives on a stream of its own, as NCCL does. gloo computes them.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "streams.h"

namespace late {

// Calls return before anything is sent. Each device has one stream for collectives, which waits for
// the caller's stream. Tasks on it are not held, so a buffer is sent too early unless the stream
// waits for its packing. Work::wait() makes the current stream wait. It blocks the host only if it
// has a timeout. As in NCCL since torch 2.8, a call with asyncOp=false runs on the caller's stream
// and returns no work, and the calls on one device run in their order, on all streams. gloo sums in
// place, in device memory, so the sums have gloo's bits. As with every task, the next wait of the
// host throws an exception of gloo.
class LateBackend final : public c10d::Backend {
 public:
  // One gloo group per device, so that its calls match in the order of one stream. `name`: of the
  // class that the backend stands for. As in torch, "nccl-lazy" does not give its number of calls.
  LateBackend(
      int rank, int size, std::vector<c10::intrusive_ptr<c10d::Backend>> gloo, std::string name);

  const std::string getBackendName() const override {
    return name_;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return name_ == "nccl-lazy" ? Backend::getSequenceNumberForGroup() : num_calls_;
  }

  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;
  // Without `override`: torch 2.11 has another name.
  void setTimeout(std::chrono::milliseconds) {}  // each call of gloo has the first timeout
  void abort() override {
    ++ends_->num_aborts;
  }
  // With failures_hang(): as NCCL, after a failed call and before an abort.
  c10d::ErrorType getError() override {
    return has_failed() ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::SUCCESS;
  }
  void shutdown() override {
    check_alive();
  }

  uint64_t num_calls() const {
    return num_calls_;
  }
  int num_allocations() const {
    return num_allocations_;
  }
  int num_aborts() const {
    return ends_->num_aborts;
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
  // How calls end that fail; see failures_hang(). Tasks in queues outlive the backend.
  struct Ends {
    std::atomic<int> num_aborts{0};
    std::atomic<bool> failed{false};
  };
  struct LastCall {
    Queue* queue = nullptr;
    Position end = 0;
  };
  using Call = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;

  bool has_failed() const {
    return ends_->failed && ends_->num_aborts == 0;
  }
  void check_alive() const;
  static void end_by_abort(const std::function<c10::intrusive_ptr<c10d::Work>()>& call, Ends& ends);
  c10::intrusive_ptr<c10d::Work> queue(
      const char* name,
      c10d::OpType type,
      const std::vector<at::Tensor>& tensors,
      bool async_op,
      Call call);

  std::vector<c10::intrusive_ptr<c10d::Backend>> gloo_;
  std::vector<c10::Stream> streams_;  // by device
  std::array<LastCall, kNumDevices> last_calls_;
  std::string name_;
  uint64_t num_calls_ = 0;
  int num_allocations_ = 0;
  std::shared_ptr<Ends> ends_ = std::make_shared<Ends>();
};

}  // namespace late
