#include "finite_check.h"

#include <ATen/ops/all.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace ddpx {

void FiniteCheck::begin_step() {
  looks_.clear();
}

void FiniteCheck::look(std::size_t param_index, const at::Tensor& grad) {
  if (!grad.defined() || (!grad.is_floating_point() && !grad.is_complex())) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto values = grad.is_sparse() ? grad._values() : grad;
  looks_.push_back({param_index, at::isfinite(values).all()});
}

std::optional<std::size_t> FiniteCheck::first_not_finite() const {
  for (const auto& look : looks_) {
    if (!look.finite.item<bool>()) {
      return look.param_index;
    }
  }
  return std::nullopt;
}

std::vector<FiniteCheck::Finding> FiniteCheck::agree(Collective& collective, c10::Device device) {
  const auto options = at::TensorOptions(at::kLong);
  auto found = at::zeros({collective.world_size()}, options);
  if (const auto param_index = first_not_finite()) {
    found[collective.rank()] = static_cast<int64_t>(*param_index) + 1;
  }
  if (!collective.alone()) {
    found = found.to(device);
    collective.wait(*collective.all_reduce_sum(found), device);
    found = found.cpu();
  }
  std::vector<Finding> findings;
  for (int rank = 0; rank < collective.world_size(); ++rank) {
    if (const auto place = found[rank].item<int64_t>(); place != 0) {
      findings.push_back({rank, static_cast<std::size_t>(place - 1)});
    }
  }
  return findings;
}

}  // namespace ddpx
