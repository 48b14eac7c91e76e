#include "weight_sum.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <limits>
#include <sstream>
#include <utility>

#include "../buckets/device_stream.h"
#include "../comm/comm_hook.h"

namespace ddpx {
namespace {

// The sum of the weights of all ranks is not positive. `own`: the weight of this rank.
std::optional<UserError> error_of(const errors::Where& where, double own, double sum) {
  if (sum > 0) {
    return std::nullopt;
  }
  std::ostringstream out;
  if (sum == 0) {
    out << "the weights of all ranks and micro-steps of this step sum to 0, so the average does "
           "not exist. At least one rank needs a loss over 1 or more items. Skip the step on all "
           "ranks otherwise.";
  } else if (own != own) {
    out << "a weight of this rank is negative, infinite or NaN.";
  } else {
    out << "a weight of another rank is negative, infinite or NaN. The error of that rank says so.";
  }
  out << " All gradients of this step are NaN. " << errors::kWeightRemedy;
  return errors::at(where, out.str());
}

}  // namespace

UnreadWeights::UnreadWeights(
    const at::Tensor& own, const at::Tensor& sum, const errors::Where& where)
    : copied_(at::empty({2}, at::TensorOptions(at::kDouble).pinned_memory(true))),
      arrived_(own.device().type()),
      where_(where) {
  const at::NoGradGuard no_grad;
  copied_.copy_(at::cat({own, sum}), /*non_blocking=*/true);
  arrived_.record(*current_stream(own.device()));
}

std::optional<UserError> UnreadWeights::error() const {
  if (!arrived_.query()) {
    arrived_.synchronize();
  }
  const auto* values = copied_.const_data_ptr<double>();
  return error_of(where_, values[0], values[1]);
}

WeightSum::WeightSum(at::Tensor own) : own_(std::move(own)) {
  streams_.add(own_.device());
}

void WeightSum::launch(Collective& collective) {
  const at::NoGradGuard no_grad;
  streams_.wait(own_.device());
  keep_for_current_stream(own_);
  sum_ = own_.clone();
  work_ = collective.all_reduce_sum(sum_);
  future_ = collective.sum_of(*work_);
}

void WeightSum::wait(Collective& collective) {
  const auto work = std::exchange(work_, nullptr);
  if (!work) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (future_) {
    collective.wait(*future_);
    sum_ = tensor_in(std::exchange(future_, nullptr)->value()).view_as(own_);
  } else {
    collective.wait(*work, own_.device());
  }
  keep_for_current_stream(sum_);
  const auto nan = at::full_like(sum_, std::numeric_limits<double>::quiet_NaN());
  divisor_ = at::where(sum_.gt(0), sum_, nan);
}

std::optional<UserError> WeightSum::error(const errors::Where& where) const {
  if (!divisor_.defined() || !own_.device().is_cpu()) {
    return std::nullopt;
  }
  return error_of(where, *own_.const_data_ptr<double>(), sum_.const_data_ptr<double>()[0]);
}

std::optional<UnreadWeights> WeightSum::unread(const errors::Where& where) const {
  if (!divisor_.defined() || own_.device().is_cpu()) {
    return std::nullopt;
  }
  keep_for_current_stream(own_);
  return UnreadWeights(own_, sum_, where);
}

}  // namespace ddpx
