// The shared-memory transport as a backend of torch's: a c10d::Backend named "shm".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../shm/group.h"
#include "between_hosts.h"
#include "gloo_faults.h"
#include "shm_work.h"

namespace ddpx {

struct ShmOptions {
  shm::Order order = shm::Order::kGloo;
  std::chrono::milliseconds timeout{kBackendDefaultTimeout};
  std::string host_identity;  // for tests: ranks with different ones do not share memory
};

// all_reduce, broadcast, all_gather, reduce_scatter and barrier of CPU tensors go through shared
// memory, everything else through `inner`, a gloo backend of the same ranks. Where the ranks are on
// several hosts, all_reduce goes through shared memory within each and `leaders` between them, and
// the rest through `inner`. Thread-safe, as far as all ranks make their calls in the same order.
class ShmBackend final : public c10d::Backend {
 public:
  // Collective over all ranks. Throws shm::Error.
  ShmBackend(
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      ShmOptions options,
      c10::intrusive_ptr<c10d::Backend> inner);

  ~ShmBackend() override;

  // A gloo backend of the first rank of each host; to be given to those if there are several hosts,
  // before the first operation.
  void set_leaders(c10::intrusive_ptr<c10d::Backend> leaders);

  const shm::Topology& topology() const {
    return topology_;
  }
  shm::Order order() const {
    return order_;
  }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_);
  }

  const std::string getBackendName() const override {
    return "shm";
  }

  bool supportsTensorAlloc(c10::DeviceIndex device_index) override;
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;
  std::size_t resident_bytes() const;  // of memory that allocateTensor() holds

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void abort() override;
  void shutdown() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Sizes = std::vector<int64_t>;

  // Natively where it can be.
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  Work _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  // By `inner`: shm_backend_gloo.cpp.
  Work allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather_coalesced(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      Sizes& output_splits,
      Sizes& input_splits,
      const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

 private:
  // How an operation appears in profiles, and what it is for gloo.
  struct Title {
    c10d::OpType type;
    const char* text;
    c10d::ReduceOp op = c10d::ReduceOp();
  };

  bool single_host() const {
    return topology_.hosts.size() == 1;
  }
  // In the arena. If there is too little memory there, the group has failed.
  at::Tensor allocate(long numel, const at::TensorOptions& options);
  // Lets `start` make copies and submit the operation. If it cannot, the group has failed: peers
  // would wait for this call, or take this rank's next one for it.
  Work natively(const char* phase, c10::function_ref<Work()> start);
  // Fails the group, on all hosts, with the exception that is being handled. Returns this rank's.
  std::exception_ptr fail_with_current_exception(const char* phase);
  // Carries it out on this thread: waking the group's own would only take a core from a peer.
  static void run(shm::Group& group, shm::Call call, ShmWork& work);
  // These throw after shutdown().
  std::shared_ptr<shm::Group> group() const;
  std::shared_ptr<BetweenHosts> between_hosts() const;
  c10::intrusive_ptr<c10d::Backend> inner() const;
  // Lets `start` begin the operation on `inner`; on a single host its errors name who is gone.
  Work through_gloo(const GlooCall& call, c10::function_ref<Work(c10d::Backend&)> start);

  // What all options of torch's have: how long peers may take, and whether the caller goes on
  // meanwhile or waits at once.
  struct Terms {
    std::chrono::milliseconds timeout;
    bool async;

    template <class Options>
    explicit Terms(const Options& options) : timeout(options.timeout), async(options.asyncOp) {}
  };

  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  // `results` is what the operation writes in the outputs' stead, or the outputs themselves.
  Work submit(
      shm::Call call,
      const Terms& terms,
      const Title& title,
      Tensors inputs,
      Tensors outputs,
      Tensors results);

  std::shared_ptr<shm::Arena> arena_;
  shm::Topology topology_;
  const shm::Order order_;
  mutable std::mutex mutex_;  // guards what follows, of which shutdown() leaves nothing
  std::shared_ptr<shm::Group> group_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<BetweenHosts> between_hosts_;  // null on a single host
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace ddpx
