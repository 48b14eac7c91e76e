// The shared-memory transport as a c10d::Backend named "shm".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
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

#include "../health_c10d/watched_backend.h"
#include "../shm/group.h"
#include "between_hosts.h"
#include "shm_work.h"

namespace ddpx {

// The backend of one rank. torch's process group owns it. Any thread may call it, if all ranks make
// their calls in the same order; the callee takes `mutex_`. The route of an operation:
//
//   operation                           on one host      on several hosts
//   all_reduce of CPU tensors           shared memory    shared memory within hosts, lanes
//                                                        between them
//   broadcast, all_gather,
//   reduce_scatter, barrier (CPU)       shared memory    `inner`
//   others                              `inner`          `inner`
//
// `inner` is a gloo backend of all ranks, a lane is a gloo backend of one rank of each host.
class ShmBackend final : public WatchedBackend {
 public:
  // Collective over all ranks. The rendezvous takes at most `options.timeout`. Throws shm::Error.
  ShmBackend(
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      shm::GroupOptions options,
      c10::intrusive_ptr<c10d::Backend> inner);

  ~ShmBackend() override;

  // If there are several hosts, the ranks of each lane between them. Each of these ranks must call
  // set_lane() with the lane's gloo backend, before the first operation.
  std::vector<std::vector<int>> lanes() const {
    return lanes_between(topology_);
  }
  void set_lane(std::size_t index, BetweenHosts::Lane lane);

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
  std::size_t resident_bytes() const;  // size of the arena behind allocateTensor()

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void abort() override;
  void shutdown() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Sizes = std::vector<int64_t>;

  // Through shared memory if possible; defined in shm_backend_native.cpp.
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

  // Through `inner`; defined in shm_backend_gloo.cpp.
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
  // An operation in torch's terms: for profiles, and for the all-reduce between hosts.
  struct OpInfo {
    c10d::OpType type;
    const char* profiling_title;
    c10d::ReduceOp reduce_op = c10d::ReduceOp();
  };

  bool single_host() const {
    return topology_.hosts.size() == 1;
  }
  // Allocates in the arena. Too little memory fails the group on all hosts.
  at::Tensor allocate(long numel, const at::TensorOptions& options);
  // Calls `start`, which copies inputs and submits the operation. If `start` throws, the group
  // fails: otherwise peers would wait for this call, or match it with this rank's next call.
  Work through_shm(const char* phase, c10::function_ref<Work()> start);
  // Fails the group on all hosts with the exception that is being handled. Returns the error of
  // this rank.
  std::exception_ptr fail_with_current_exception(const char* phase);
  // These three throw after shutdown().
  std::shared_ptr<shm::Group> group() const {
    return held(group_);
  }
  std::shared_ptr<BetweenHosts> between_hosts() const {
    return held(between_hosts_);
  }
  c10::intrusive_ptr<c10d::Backend> inner() const {
    return held(inner_);
  }
  template <class Pointer>
  Pointer held(const Pointer& member) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(
        member,
        "[ddpx shm] the process group was destroyed before this call. Make the call before you "
        "destroy the group, or make a new group.");
    return member;
  }
  // Calls `start`, which starts the operation on `inner`. See GlooWork for its errors.
  Work through_gloo(
      const char* name, c10::function_ref<Work(c10d::Backend&)> start, bool collective = true);

  // The options that all operations of torch have.
  struct CommonOptions {
    std::chrono::milliseconds timeout;
    bool async;  // false: the call waits for the end of the operation

    template <class Options>
    explicit CommonOptions(const Options& options)
        : timeout(options.timeout), async(options.asyncOp) {}
  };

  // The operation writes `results`: the outputs themselves, or copies of them.
  Work submit(
      shm::Call call,
      const CommonOptions& options,
      const OpInfo& info,
      Tensors inputs,
      Tensors outputs,
      Tensors results);

  std::shared_ptr<shm::Arena> arena_;
  shm::Topology topology_;
  const shm::Order order_;
  mutable std::mutex mutex_;  // guards the next three members, which shutdown() clears
  std::shared_ptr<shm::Group> group_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<BetweenHosts> between_hosts_;  // null on a single host
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace ddpx
