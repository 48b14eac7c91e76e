#include "grad_versions.h"

#include <numeric>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {

void GradVersions::record(const std::vector<at::Tensor>& params) {
  std::vector<std::size_t> all(params.size());
  std::iota(all.begin(), all.end(), 0);
  record(params, all);
}

void GradVersions::record(
    const std::vector<at::Tensor>& params, const std::vector<std::size_t>& param_indices) {
  grads_.clear();
  for (const auto i : param_indices) {
    if (const auto& grad = grad_of(params[i]); grad.defined()) {
      grads_.push_back({i, c10::weak_intrusive_ptr(grad.getIntrusivePtr()), version_of(grad)});
    }
  }
}

std::vector<std::size_t> GradVersions::pop_unchanged(const std::vector<at::Tensor>& params) {
  return pop(params, /*changed=*/false);
}

std::vector<std::size_t> GradVersions::pop_changed(const std::vector<at::Tensor>& params) {
  return pop(params, /*changed=*/true);
}

std::vector<std::size_t> GradVersions::pop(const std::vector<at::Tensor>& params, bool changed) {
  std::vector<std::size_t> found;
  for (const auto& [param_index, tensor, version] : std::exchange(grads_, {})) {
    const auto& grad = grad_of(params[param_index]);
    const bool same = grad.defined() && grad.unsafeGetTensorImpl() == tensor._unsafe_get_target() &&
                      version_of(grad) == version;
    if (same != changed) {
      found.push_back(param_index);
    }
  }
  return found;
}

}  // namespace ddpx
