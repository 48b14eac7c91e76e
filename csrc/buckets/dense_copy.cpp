#include "dense_copy.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "grad_values.h"

namespace ddpx {
namespace {

// Below this number of elements, a second thread costs more time than it saves. The figure is
// torch's.
constexpr int64_t kGrain = 32768;

// at::parallel_for costs more than the work on a small tensor.
template <typename Work>
void in_ranges(int64_t size, int64_t grain, const Work& work) {
  if (size <= grain) {
    work(0, size);
  } else {
    at::parallel_for(0, size, grain, work);
  }
}

bool laid_out_alike(const at::Tensor& a, const at::Tensor& b) {
  return holds_values_on_cpu(a) && holds_values_on_cpu(b) && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

// As at::mul: one product in the arithmetic type (float for half precision), then rounding.
template <typename From, typename To>
void scale(const From* grad, To* slot, int64_t numel, double factor) {
  using Math = at::opmath_type<To>;
  const auto math_factor = static_cast<Math>(factor);
  in_ranges(numel, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      slot[i] = static_cast<To>(static_cast<Math>(grad[i]) * math_factor);
    }
  });
}

template <typename From, typename To = From>
bool scale(const at::Tensor& grad, const at::Tensor& slot, double factor) {
  scale(grad.const_data_ptr<From>(), slot.mutable_data_ptr<To>(), slot.numel(), factor);
  return true;
}

}  // namespace

bool pack_scaled_dense(const at::Tensor& grad, const at::Tensor& slot, double factor) {
  if (!laid_out_alike(grad, slot)) {
    return false;
  }
  const bool to_float = slot.scalar_type() == at::kFloat;
  if (grad.scalar_type() != slot.scalar_type() && !to_float) {
    return false;
  }
  switch (grad.scalar_type()) {
    case at::kFloat:
      return scale<float>(grad, slot, factor);
    case at::kDouble:
      return !to_float && scale<double>(grad, slot, factor);
    case at::kHalf:
      return to_float ? scale<at::Half, float>(grad, slot, factor)
                      : scale<at::Half>(grad, slot, factor);
    case at::kBFloat16:
      return to_float ? scale<at::BFloat16, float>(grad, slot, factor)
                      : scale<at::BFloat16>(grad, slot, factor);
    default:
      return false;
  }
}

bool copy_dense(const at::Tensor& from, const at::Tensor& to) {
  if (from.scalar_type() != to.scalar_type() || !laid_out_alike(from, to) || to.is_inference()) {
    return false;
  }
  const auto* source = static_cast<const std::byte*>(from.const_data_ptr());
  auto* target = static_cast<std::byte*>(to.mutable_data_ptr());
  const auto num_bytes = static_cast<int64_t>(to.nbytes());
  if (source != target) {
    in_ranges(num_bytes, 4 * kGrain, [=](int64_t begin, int64_t end) {
      std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin));
    });
  }
  torch::autograd::impl::bump_version(to);
  return true;
}

}  // namespace ddpx
