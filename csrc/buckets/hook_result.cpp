// A communication hook in the place of the all-reduce of a bucket, and the check of its result.
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>

#include <string>
#include <utility>
#include <vector>

#include "../count.h"
#include "../errors.h"
#include "bucket.h"
#include "grad_values.h"

namespace ddpx {

void Bucket::launch(
    CommHook& hook, std::size_t index, std::size_t count, const std::vector<at::Tensor>& params) {
  RECORD_FUNCTION("ddpx::launch", {});
  // Hooks get real numbers, as in DDP: two for a complex one.
  const bool complex = !sparse() && buffer().is_complex();
  const std::size_t reals = complex ? 2 : 1;
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  real_sizes_.clear();
  real_sizes_.reserve(slots().size());
  std::vector<at::Tensor> bucket_params;
  for (const auto& slot : slots()) {
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
      complex ? at::view_as_real(buffer()).view({-1}) : buffer(),
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      std::move(bucket_params),
      std::nullopt);
  in_flight_ = InFlightReduction{nullptr, hook.runHook(bucket), &hook};
}

at::Tensor Bucket::as_reduced(const at::Tensor& result, const std::string& source) const {
  if (!result.defined()) {
    throw UserError("the result of " + source + " is None, but must be a tensor");
  }
  if (sparse()) {
    if (!result.is_sparse() || result.sizes() != buffer().sizes()) {
      throw UserError(
          "the result of " + source + " must be a sparse tensor of the same size as the gradient");
    }
    return result;
  }
  const auto numel = buffer().numel() * (buffer().is_complex() && !result.is_complex() ? 2 : 1);
  if (!has_values(result)) {
    throw UserError(
        "the result of " + source + " is " + describe(result) + ", but must be a dense tensor");
  }
  if (result.numel() != numel || result.device() != buffer().device()) {
    throw UserError(
        "the result of " + source + " has " + count(result.numel(), "element") + " on " +
        result.device().str() + ", but the bucket has " + count(numel, "element") + " on " +
        buffer().device().str());
  }
  const auto values = holds_values(result) ? result : copy_of_values(result);
  if (buffer().is_complex() && !values.is_complex()) {
    const auto real = values.to(c10::toRealValueType(buffer().scalar_type()));
    return at::view_as_complex(real.reshape({-1, 2}).contiguous());
  }
  return values.contiguous();
}

}  // namespace ddpx
