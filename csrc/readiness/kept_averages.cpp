#include "kept_averages.h"

#include <numeric>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {

void KeptAverages::record(const std::vector<at::Tensor>& params) {
  std::vector<std::size_t> all(params.size());
  std::iota(all.begin(), all.end(), 0);
  record(params, all);
}

void KeptAverages::record(
    const std::vector<at::Tensor>& params, const std::vector<std::size_t>& param_indices) {
  averages_.clear();
  for (const auto i : param_indices) {
    if (const auto& grad = grad_of(params[i]); grad.defined()) {
      averages_.push_back({i, c10::weak_intrusive_ptr(grad.getIntrusivePtr()), version_of(grad)});
    }
  }
}

std::vector<std::size_t> KeptAverages::pop_unchanged(const std::vector<at::Tensor>& params) {
  std::vector<std::size_t> unchanged;
  const auto averages = std::exchange(averages_, {});
  for (const auto& average : averages) {
    const auto& grad = grad_of(params[average.param_index]);
    if (grad.defined() && grad.unsafeGetTensorImpl() == average.grad._unsafe_get_target() &&
        version_of(grad) == average.version) {
      unchanged.push_back(average.param_index);
    }
  }
  return unchanged;
}

}  // namespace ddpx
