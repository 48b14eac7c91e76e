#include "shm_backend.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../shm/error.h"
#include "element_type.h"
#include "store_channel.h"

namespace ddpx {
namespace {

using Tensors = ShmBackend::Tensors;

bool same_dtype_and_size(const Tensors& tensors, const at::Tensor& like) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel() &&
           elements_of(tensor).has_value();
  });
}

shm::GroupOptions group_options(const ShmOptions& options) {
  shm::GroupOptions group;
  group.order = options.order;
  group.timeout = options.timeout;
  group.host_identity = options.host_identity;
  return group;
}

}  // namespace

ShmBackend::ShmBackend(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    ShmOptions options,
    c10::intrusive_ptr<c10d::Backend> inner)
    : Backend(rank, size),
      arena_(std::make_shared<shm::Arena>()),
      inner_(std::move(inner)),
      timeout_ms_(options.timeout.count()) {
  StoreChannel channel(std::move(store));
  group_ = std::make_shared<shm::Group>(channel, rank, size, group_options(options), arena_);
  topology_ = group_->topology();
  if (!single_host()) {
    between_hosts_ = std::make_unique<BetweenHosts>(group_);
  }
}

ShmBackend::~ShmBackend() = default;

void ShmBackend::set_leaders(c10::intrusive_ptr<c10d::Backend> leaders) {
  TORCH_CHECK(between_hosts_, "all ranks are on one host: there is nothing to lead");
  between_hosts_->set_leaders(std::move(leaders));
}

// ---- memory ------------------------------------------------------------------------------------

// CPU devices have no index.
bool ShmBackend::supportsTensorAlloc(c10::DeviceIndex device_index) {
  return device_index < 0 && group_ && group_->local_size() > 1;
}

at::Tensor ShmBackend::allocateTensor(long numel, at::TensorOptions options) {
  TORCH_CHECK(options.device().is_cpu(), "shm allocates on CPU, not on ", options.device());
  const auto num_bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
  void* block = arena_->allocate(std::max<std::size_t>(num_bytes, 1));
  return at::from_blob(
      block, {numel}, [arena = arena_, block](void*) { arena->free(block); }, options);
}

std::size_t ShmBackend::resident_bytes() const {
  return arena_->resident_bytes();
}

// ---- the group ---------------------------------------------------------------------------------

shm::Group& ShmBackend::group() const {
  TORCH_CHECK(group_, "[ddpx shm] the process group was destroyed");
  return *group_;
}

c10d::Backend& ShmBackend::inner() const {
  TORCH_CHECK(inner_, "[ddpx shm] the process group was destroyed");
  return *inner_;
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = timeout.count();
  inner().setTimeout(timeout);
}

void ShmBackend::setSequenceNumberForGroup() {}  // all ranks count from 0

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return sequence_;
}

void ShmBackend::abort() {
  group().abort("the process group was aborted");
  inner().abort();
}

void ShmBackend::shutdown() {
  between_hosts_.reset();
  group_.reset();
  if (inner_) {
    inner_->shutdown();
  }
  inner_.reset();
}

// ---- operations through shared memory ----------------------------------------------------------

ShmBackend::Work ShmBackend::submit(
    shm::Call call,
    std::chrono::milliseconds timeout,
    const Title& title,
    Tensors inputs,
    Tensors outputs) {
  auto& local = group();
  call.timeout = timeout == c10d::kUnsetTimeout ? std::chrono::milliseconds(timeout_ms_) : timeout;
  auto work = c10::make_intrusive<ShmWork>(
      rank_, title.type, title.text, std::move(inputs), std::move(outputs), ++sequence_);
  auto ticket =
      local.submit(std::move(call), [work](std::exception_ptr error) { work->end(error); });
  work->submitted(
      [ticket]() mutable {
        try {
          ticket.wait();
        } catch (...) {
          // The work has it, as an error of torch's.
        }
      },
      [ticket](std::chrono::milliseconds limit) { return ticket.wait_for(limit); });
  return work;
}

ShmBackend::Work ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto elements = tensors.size() == 1 ? elements_of(tensors[0]) : std::nullopt;
  const auto op = elements ? reduction(options.reduceOp, tensors[0]) : std::nullopt;
  if (!op) {
    ++sequence_;
    return inner().allreduce(tensors, options);
  }
  auto* data = tensors[0].mutable_data_ptr();
  auto call = shm::all_reduce_call(data, data, elements->count, elements->dtype, *op);
  if (!single_host()) {
    return submit_between_hosts(tensors[0], call, options);
  }
  return submit(
      std::move(call),
      options.timeout,
      {c10d::OpType::ALLREDUCE, "shm:all_reduce"},
      tensors,
      tensors);
}

ShmBackend::Work ShmBackend::submit_between_hosts(
    at::Tensor tensor, const shm::Call& call, const c10d::AllreduceOptions& options) {
  TORCH_CHECK(between_hosts_, "[ddpx shm] the process group was destroyed");
  auto work = c10::make_intrusive<ShmWork>(
      rank_,
      c10d::OpType::ALLREDUCE,
      "shm:all_reduce",
      Tensors{tensor},
      Tensors{tensor},
      ++sequence_);
  between_hosts_->submit({std::move(tensor), call, options.reduceOp, size_, work});
  return work;
}

ShmBackend::Work ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto bytes = tensors.size() == 1 ? bytes_of(tensors[0]) : std::nullopt;
  if (!bytes || !single_host()) {
    ++sequence_;
    return inner().broadcast(tensors, options);
  }
  TORCH_CHECK(
      options.rootRank >= 0 && options.rootRank < size_,
      "broadcast: invalid root rank ",
      options.rootRank);
  const int root = topology_.local_rank_of[static_cast<std::size_t>(options.rootRank)];
  return submit(
      shm::broadcast_call(tensors[0].mutable_data_ptr(), bytes->count, bytes->dtype, root),
      options.timeout,
      {c10d::OpType::BROADCAST, "shm:broadcast"},
      tensors,
      tensors);
}

ShmBackend::Work ShmBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const bool native = single_host() && inputs.size() == 1 && outputs.size() == 1 &&
                      outputs[0].size() == static_cast<std::size_t>(size_) &&
                      elements_of(inputs[0]) && same_dtype_and_size(outputs[0], inputs[0]);
  if (!native) {
    ++sequence_;
    return inner().allgather(outputs, inputs, options);
  }
  const auto bytes = *bytes_of(inputs[0]);
  auto call = shm::all_gather_call(inputs[0].const_data_ptr(), nullptr, bytes.count, bytes.dtype);
  for (const auto& output : outputs[0]) {
    call.outputs.push_back(output.mutable_data_ptr());
  }
  return submit(
      std::move(call),
      options.timeout,
      {c10d::OpType::ALLGATHER, "shm:all_gather"},
      inputs,
      outputs[0]);
}

ShmBackend::Work ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  const bool native = single_host() && bytes_of(input) && bytes_of(output) &&
                      input.scalar_type() == output.scalar_type() &&
                      output.numel() == input.numel() * size_;
  if (!native) {
    ++sequence_;
    return inner()._allgather_base(output, input, options);
  }
  const auto bytes = *bytes_of(input);
  return submit(
      shm::all_gather_call(
          input.const_data_ptr(), output.mutable_data_ptr(), bytes.count, bytes.dtype),
      options.timeout,
      {c10d::OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor"},
      {input},
      {output});
}

ShmBackend::Work ShmBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const bool native = single_host() && outputs.size() == 1 && inputs.size() == 1 &&
                      inputs[0].size() == static_cast<std::size_t>(size_) &&
                      elements_of(outputs[0]) && reduction(options.reduceOp, outputs[0]) &&
                      same_dtype_and_size(inputs[0], outputs[0]);
  if (!native) {
    ++sequence_;
    return inner().reduce_scatter(outputs, inputs, options);
  }
  const auto elements = *elements_of(outputs[0]);
  auto call = shm::reduce_scatter_call(
      nullptr,
      outputs[0].mutable_data_ptr(),
      elements.count,
      elements.dtype,
      *reduction(options.reduceOp, outputs[0]));
  for (const auto& input : inputs[0]) {
    call.inputs.push_back(input.const_data_ptr());
  }
  return submit(
      std::move(call),
      options.timeout,
      {c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter"},
      inputs[0],
      outputs);
}

ShmBackend::Work ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const bool native = single_host() && elements_of(output) && elements_of(input) &&
                      input.scalar_type() == output.scalar_type() &&
                      input.numel() == output.numel() * size_ &&
                      reduction(options.reduceOp, output);
  if (!native) {
    ++sequence_;
    return inner()._reduce_scatter_base(output, input, options);
  }
  const auto elements = *elements_of(output);
  return submit(
      shm::reduce_scatter_call(
          input.const_data_ptr(),
          output.mutable_data_ptr(),
          elements.count,
          elements.dtype,
          *reduction(options.reduceOp, output)),
      options.timeout,
      {c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor"},
      {input},
      {output});
}

ShmBackend::Work ShmBackend::barrier(const c10d::BarrierOptions& options) {
  if (!single_host()) {
    ++sequence_;
    return inner().barrier(options);
  }
  return submit(
      shm::barrier_call(), options.timeout, {c10d::OpType::BARRIER, "shm:barrier"}, {}, {});
}

// ---- operations through gloo -------------------------------------------------------------------

ShmBackend::Work ShmBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  ++sequence_;
  return inner().allreduce_sparse(tensors, options);
}

ShmBackend::Work ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  ++sequence_;
  return inner().allreduce_coalesced(tensors, options);
}

ShmBackend::Work ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  ++sequence_;
  return inner().reduce(tensors, options);
}

ShmBackend::Work ShmBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  ++sequence_;
  return inner().allgather_coalesced(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  ++sequence_;
  return inner().allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  ++sequence_;
  return inner().gather(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  ++sequence_;
  return inner().scatter(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  ++sequence_;
  return inner().reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    Sizes& output_splits,
    Sizes& input_splits,
    const c10d::AllToAllOptions& options) {
  ++sequence_;
  return inner().alltoall_base(output, input, output_splits, input_splits, options);
}

ShmBackend::Work ShmBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  ++sequence_;
  return inner().alltoall(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::send(Tensors& tensors, int destination, int tag) {
  return inner().send(tensors, destination, tag);
}

ShmBackend::Work ShmBackend::recv(Tensors& tensors, int source, int tag) {
  return inner().recv(tensors, source, tag);
}

ShmBackend::Work ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return inner().recvAnysource(tensors, tag);
}

}  // namespace ddpx
