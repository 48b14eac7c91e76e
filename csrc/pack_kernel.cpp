#include "pack_kernel.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <cstdint>

namespace ddpx {
namespace {

// Elements below which a second thread costs more than it brings; torch's own figure.
constexpr int64_t kGrain = 32768;

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// As at::mul does: one product in the type of arithmetic, float for half precision, then rounded.
template <typename Scalar>
void scale(const Scalar* grad, Scalar* slot, int64_t numel, double factor) {
  using Math = at::opmath_type<Scalar>;
  const auto math_factor = static_cast<Math>(factor);
  at::parallel_for(0, numel, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      slot[i] = static_cast<Scalar>(static_cast<Math>(grad[i]) * math_factor);
    }
  });
}

template <typename Scalar>
void scale(const at::Tensor& grad, const at::Tensor& slot, double factor) {
  scale(grad.const_data_ptr<Scalar>(), slot.mutable_data_ptr<Scalar>(), slot.numel(), factor);
}

}  // namespace

bool pack_scaled_dense(const at::Tensor& grad, const at::Tensor& slot, double factor) {
  const auto dtype = slot.scalar_type();
  if (grad.scalar_type() != dtype || !plain(grad) || !plain(slot) || grad.sizes() != slot.sizes() ||
      grad.strides() != slot.strides() || !slot.is_non_overlapping_and_dense()) {
    return false;
  }
  switch (dtype) {
    case at::kFloat:
      scale<float>(grad, slot, factor);
      return true;
    case at::kDouble:
      scale<double>(grad, slot, factor);
      return true;
    case at::kHalf:
      scale<at::Half>(grad, slot, factor);
      return true;
    case at::kBFloat16:
      scale<at::BFloat16>(grad, slot, factor);
      return true;
    default:
      return false;
  }
}

}  // namespace ddpx
