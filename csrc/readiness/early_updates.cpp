#include "early_updates.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace ddpx {
namespace {

// A param whose hook was removed counts, too. The field is read directly, because torch's
// post_acc_grad_hooks() is not inline.
bool has_post_accumulate_hook(const at::Tensor& param) {
  const auto* meta = param.unsafeGetTensorImpl()->autograd_meta();
  return meta != nullptr &&
         static_cast<const torch::autograd::AutogradMeta*>(meta)->post_acc_grad_hooks_ != nullptr;
}

}  // namespace

void EarlyUpdates::watch_hooked(const std::vector<at::Tensor>& params) {
  clear();
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (has_post_accumulate_hook(params[i])) {
      hooked_.resize(params.size());
      hooked_[i] = version_of(params[i]);
    }
  }
}

std::vector<std::size_t> EarlyUpdates::pop_changed() {
  auto changed = std::exchange(changed_, {});
  clear();
  return changed;
}

}  // namespace ddpx
