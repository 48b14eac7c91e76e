#include "weights.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "../buckets/device_stream.h"

namespace ddpx {

void Weights::set(double number) {
  next_ = Weight{number, {}};
}

void Weights::set(const at::Tensor& tensor, c10::Device device) {
  const at::NoGradGuard no_grad;
  const auto value = tensor.detach().to(device, at::kDouble, /*non_blocking=*/true).reshape({1});
  const auto valid = value.ge(0).logical_and(value.lt(std::numeric_limits<double>::infinity()));
  // A new tensor, because the script may change its own. A number in place of the tensor `nan`
  // would be copied to the device, for which the host waits.
  const auto nan = at::full_like(value, std::numeric_limits<double>::quiet_NaN());
  next_ = Weight{std::nullopt, at::where(valid, value, nan)};
  streams_.add(device);
}

void Weights::count(WatchedForward forward) {
  if (!next_) {
    return;
  }
  auto next = *std::exchange(next_, std::nullopt);
  is_sum_cleared_ = false;
  last_forward_ = forward;
  if (next.number != 0) {
    forwards_.push_back(std::move(forward));
  }
  if (!sum_) {
    sum_ = std::move(next);
    return;
  }
  if (next.number) {
    sum_->number = sum_->number.value_or(0) + *next.number;
  }
  if (next.tensor.defined() && sum_->tensor.defined()) {
    const at::NoGradGuard no_grad;
    const auto device = next.tensor.device();
    streams_.wait(device);
    keep_for_current_stream(sum_->tensor);
    keep_for_current_stream(next.tensor);
    sum_->tensor = sum_->tensor.add(next.tensor);
    streams_.add(device);
  } else if (next.tensor.defined()) {
    sum_->tensor = std::move(next.tensor);
  }
}

void Weights::count_bypass() {
  if (!next_ || last_forward_.only_differentiated()) {
    return;
  }
  if (is_sum_cleared_) {
    forget();
  }
  count();
}

bool Weights::has_number() const {
  return (next_ && next_->number) || (sum_ && sum_->number);
}

bool Weights::belongs_to_grads() const {
  const auto left_out = [](const auto& forward) { return forward.left_out(); };
  return !forwards_.empty() && std::none_of(forwards_.begin(), forwards_.end(), left_out);
}

bool Weights::took_too_much() {
  const auto taken = std::exchange(taken_, {});
  return std::any_of(
      taken.begin(), taken.end(), [](const auto& forward) { return forward.left_out(); });
}

at::Tensor Weights::take(c10::Device device) {
  const at::NoGradGuard no_grad;
  taken_ = std::exchange(forwards_, {});
  last_forward_ = {};
  const auto sum = std::exchange(sum_, std::nullopt).value_or(Weight{});
  const auto options = at::TensorOptions(at::kDouble).device(device);
  if (!sum.tensor.defined()) {
    return at::full({1}, sum.number.value_or(0), options);
  }
  streams_.wait(device);
  keep_for_current_stream(sum.tensor);
  return sum.tensor.add(sum.number.value_or(0));
}

}  // namespace ddpx
