// The reduction of a bucket: launch, wait, and the check of its result.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>
#include <vector>

#include "../count.h"
#include "../errors.h"
#include "bucket.h"
#include "grad_values.h"
#include "sparse_rows.h"

namespace ddpx {

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

}  // namespace ddpx
