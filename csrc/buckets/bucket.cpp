#include "bucket.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>

#include "../count.h"
#include "../errors.h"
#include "device_stream.h"
#include "grad_scaling.h"
#include "grad_values.h"
#include "sparse_rows.h"

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

Bucket::Bucket(
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
    allocate(collective, params);
  }
}

void Bucket::pack_small_together(int64_t below) {
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

void Bucket::allocate(Collective& collective, const std::vector<at::Tensor>& params) {
  buffer_ = collective.allocate(numel_, at::TensorOptions(dtypes_.summed).device(device_));
  for (auto& slot : slots_) {
    slot.view = slot_view(buffer_, slot.offset, params[slot.param_index]);
  }
}

bool Bucket::ensure_memory(Collective& collective, const std::vector<at::Tensor>& params) {
  if (has_memory()) {
    if (allocated_on_) {
      // The stream of the allocation may still use what was in the memory before.
      wait_for_stream(*current_stream(device_), *allocated_on_);
    }
    return false;
  }
  const at::NoGradGuard no_grad;
  allocate(collective, params);
  allocated_on_ = current_stream(device_);
  return true;
}

void Bucket::free_memory() {
  if (sparse_) {
    return;
  }
  keep_for_streams();
  buffer_.reset();
  reduced_.reset();
  for (auto& slot : slots_) {
    slot.view.reset();
    slot.grad_alias.reset();
  }
}

void Bucket::set_sparse(at::Tensor grad) {
  buffer_ = std::move(grad);
}

void Bucket::keep_for_streams() const {
  if (buffer_.defined() && !sparse_) {
    streams_.keep_alive(buffer_);
  }
}

void Bucket::wait_for_streams() {
  streams_.wait(device_);
}

void Bucket::divide(int divisor) {
  wait_for_streams();
  const at::NoGradGuard no_grad;
  divide_in_place(buffer_, divisor);
}

void Bucket::prepare_launch() {
  wait_for_streams();
  add_stream();  // after an abort, wait_for_streams() waits for the gradients again
}

void Bucket::launch(Collective& collective) {
  RECORD_FUNCTION("ddpx::launch", {});
  if (rows_.defined()) {
    row_values_ = values_at_rows(buffer_, rows_);
  }
  const auto& sent = row_values_.defined() ? row_values_ : buffer_;
  // Backends sum real numbers. A complex sum is the sum of its parts.
  const auto real = !sent.is_sparse() && sent.is_complex() ? at::view_as_real(sent) : sent;
  auto work = collective.all_reduce_sum(real);
  auto sum = collective.sum_of(*work);
  in_flight_ = InFlightReduction{std::move(work), std::move(sum), nullptr};
}

void Bucket::launch(
    CommHook& hook, std::size_t index, std::size_t count, const std::vector<at::Tensor>& params) {
  RECORD_FUNCTION("ddpx::launch", {});
  // Hooks get real numbers, as in DDP: two for a complex one.
  const bool complex = !sparse_ && buffer_.is_complex();
  const std::size_t reals = complex ? 2 : 1;
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  real_sizes_.clear();
  real_sizes_.reserve(slots_.size());
  std::vector<at::Tensor> bucket_params;
  for (const auto& slot : slots_) {
    const auto& param = params[slot.param_index];
    offsets.push_back(static_cast<std::size_t>(slot.offset) * reals);
    lengths.push_back(static_cast<std::size_t>(param.numel()) * reals);
    sizes.push_back(param.sizes());
    if (complex) {
      real_sizes_.push_back(param.sizes().vec());
      real_sizes_.back().push_back(2);
      sizes.back() = real_sizes_.back();
    }
    bucket_params.push_back(param);
  }
  c10d::GradBucket bucket(
      index,
      count,
      complex ? at::view_as_real(buffer_).view({-1}) : buffer_,
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      std::move(bucket_params),
      std::nullopt);
  in_flight_ = InFlightReduction{nullptr, hook.runHook(bucket), &hook};
}

void Bucket::wait(Collective& collective) {
  RECORD_FUNCTION("ddpx::wait", {});
  // Dropped even if the wait throws: a work is waited for once.
  const auto flight = std::exchange(in_flight_, std::nullopt);
  add_stream();
  if (!flight) {
    throw InternalError("waiting for a bucket that was not launched");
  }
  if (flight->future) {
    collective.wait(*flight->future);
  } else {
    collective.wait(*flight->work, device_);
  }
  if (flight->hook != nullptr) {
    const auto result = flight->hook->parseHookResult(flight->future->value());
    reduced_ = as_reduced(result, "the communication hook");
    return;
  }
  const auto sum = flight->future ? tensor_in(flight->future->value()) : at::Tensor();
  if (row_values_.defined()) {
    const auto sent = std::exchange(row_values_, {});
    reduced_ = sparse_from_rows(flight->future ? sum.view_as(sent) : sent, rows_, buffer_);
  } else {
    reduced_ = flight->future ? as_reduced(sum, "the all-reduce of the process group") : buffer_;
  }
}

at::Tensor Bucket::as_reduced(const at::Tensor& result, const std::string& source) const {
  if (!result.defined()) {
    throw UserError("the result of " + source + " is None, but must be a tensor");
  }
  if (sparse_) {
    if (!result.is_sparse() || result.sizes() != buffer_.sizes()) {
      throw UserError(
          "the result of " + source + " must be a sparse tensor of the same size as the gradient");
    }
    return result;
  }
  const auto numel = buffer_.numel() * (buffer_.is_complex() && !result.is_complex() ? 2 : 1);
  if (!has_values(result)) {
    throw UserError(
        "the result of the communication hook is " + describe(result) +
        ", but must be a dense tensor");
  }
  if (result.numel() != numel || result.device() != buffer_.device()) {
    throw UserError(
        "the result of " + source + " has " + count(result.numel(), "element") + " on " +
        result.device().str() + ", but the bucket has " + count(numel, "element") + " on " +
        buffer_.device().str());
  }
  const auto values = holds_values(result) ? result : copy_of_values(result);
  if (buffer_.is_complex() && !values.is_complex()) {
    const auto real = values.to(c10::toRealValueType(buffer_.scalar_type()));
    return at::view_as_complex(real.reshape({-1, 2}).contiguous());
  }
  return values.contiguous();
}

void Bucket::divide_reduced(const at::Tensor& divisor) {
  const at::NoGradGuard no_grad;
  const auto type = reduced_.scalar_type();
  const bool is_double = type == at::kDouble || type == at::kComplexDouble;
  const auto real_divisor = divisor.to(device_, is_double ? at::kDouble : at::kFloat, true);
  const auto values = sparse_ ? reduced_._values() : reduced_;
  const auto real = values.is_complex() ? at::view_as_real(values) : values;
  if (!sparse_ && reduced_.is_alias_of(buffer_)) {
    real.div_(real_divisor);
    return;
  }
  auto quotient = real.div(real_divisor);
  if (values.is_complex()) {
    quotient = at::view_as_complex(quotient);
  }
  reduced_ = sparse_ ? at::_sparse_coo_tensor_unsafe(
                           reduced_._indices(), quotient.to(type), reduced_.sizes())
                           ._coalesced_(reduced_.is_coalesced())
                     : quotient;
}

at::Tensor Bucket::slots_between(std::size_t first, std::size_t end) const {
  const auto begin = slots_[first].offset;
  return buffer_.narrow(0, begin, (end < slots_.size() ? slots_[end].offset : numel_) - begin);
}

at::Tensor Bucket::reduced_slot(const Slot& slot) const {
  if (reduced_.is_same(buffer_)) {
    return slot.view;
  }
  return slot_view(reduced_.view({-1}), slot.offset, slot.view);
}

Bucket Bucket::zeros_like(const std::vector<at::Tensor>& params) const {
  Bucket other;
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
