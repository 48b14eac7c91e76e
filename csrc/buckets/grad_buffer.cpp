#include "grad_buffer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "device_stream.h"
#include "grad_scaling.h"
#include "normal_tensors.h"

namespace ddpx {
namespace {

at::Tensor slot_view(const at::Tensor& buffer, int64_t offset, const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    // Same strides as the param, so that optimizers and autograd meet the layout they expect.
    return buffer.as_strided(param.sizes(), param.strides(), buffer.storage_offset() + offset);
  }
  return buffer.narrow(0, offset, param.numel()).view(param.sizes());
}

}  // namespace

GradBuffer::GradBuffer(
    const BucketSpec& spec,
    const std::vector<at::Tensor>& params,
    bool sparse,
    Collective& collective,
    const Precision& precision,
    bool lazy)
    : device_(params[spec.param_indices.front()].device()),
      sparse_(sparse),
      dtypes_(precision.of(params[spec.param_indices.front()].scalar_type())) {
  if (sparse_) {
    slots_.push_back(Slot{spec.param_indices.front(), 0, {}, {}});
    return;
  }
  for (const auto param_index : spec.param_indices) {
    slots_.push_back(Slot{param_index, numel_, {}, {}});
    numel_ += params[param_index].numel();
  }
  if (!lazy) {
    allocate(collective, params, /*captured=*/false);
  }
}

void GradBuffer::pack_small_together(int64_t below) {
  if (device_.is_cpu() || sparse_ || c10::isComplexType(dtypes_.summed)) {
    return;
  }
  const auto size = static_cast<int64_t>(c10::elementSize(dtypes_.summed));
  std::vector<Slot*> small;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto end = i + 1 < slots_.size() ? slots_[i + 1].offset : numel_;
    if ((end - slots_[i].offset) * size < below) {
      small.push_back(&slots_[i]);
    }
  }
  has_small_slots_ = small.size() > 1;
  for (auto* slot : small) {
    slot->small = has_small_slots_;
  }
}

void GradBuffer::allocate(
    Collective& collective, const std::vector<at::Tensor>& params, bool captured) {
  const NormalTensors normal;
  const auto options = at::TensorOptions(dtypes_.summed).device(device_);
  // The memory of a backend would outlive the capture without belonging to the graph.
  buffer_ = captured ? at::empty({numel_}, options) : collective.allocate(numel_, options);
  for (auto& slot : slots_) {
    slot.view = slot_view(buffer_, slot.offset, params[slot.param_index]);
  }
}

bool GradBuffer::ensure_memory(
    Collective& collective, const std::vector<at::Tensor>& params, bool captured) {
  if (has_memory()) {
    if (allocated_on_) {
      // The stream of the allocation may still use what was in the memory before.
      wait_for_stream(*current_stream(device_), *allocated_on_);
    }
    return false;
  }
  allocate(collective, params, captured || is_capturing(device_));
  allocated_on_ = current_stream(device_);
  return true;
}

void GradBuffer::set_sparse(at::Tensor grad) {
  buffer_ = std::move(grad);
}

void GradBuffer::divide(int divisor) {
  wait_for_streams();
  const at::NoGradGuard no_grad;
  // As in DDP, a batched copy divides the two parts of a complex number, and a single copy divides
  // the number.
  divide_in_place(buffer_.is_complex() ? at::view_as_real(buffer_) : buffer_, divisor);
}

at::Tensor GradBuffer::slots_between(std::size_t first, std::size_t end) const {
  const auto begin = slots_[first].offset;
  return buffer_.narrow(0, begin, (end < slots_.size() ? slots_[end].offset : numel_) - begin);
}

at::Tensor GradBuffer::part_of(const at::Tensor& values, const Slot& slot) {
  return slot_view(values.view({-1}), slot.offset, slot.view);
}

void GradBuffer::drop_memory() {
  buffer_.reset();
  for (auto& slot : slots_) {
    slot.view.reset();
    slot.grad_alias.reset();
  }
}

GradBuffer GradBuffer::zeros(const std::vector<at::Tensor>& params) const {
  GradBuffer other;
  other.device_ = device_;
  other.sparse_ = sparse_;
  other.dtypes_ = dtypes_;
  if (sparse_) {
    other.slots_ = slots_;
    other.buffer_ = empty_sparse_grad(params[slots_.front().param_index], dtypes_.summed);
    other.rows_ = rows_;
    return other;
  }
  other.numel_ = numel_;
  other.buffer_ = at::zeros({numel_}, at::TensorOptions(dtypes_.summed).device(device_));
  for (const auto& slot : slots_) {
    auto view = slot_view(other.buffer_, slot.offset, params[slot.param_index]);
    other.slots_.push_back(Slot{slot.param_index, slot.offset, std::move(view), {}});
  }
  return other;
}

}  // namespace ddpx
