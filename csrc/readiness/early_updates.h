// Params that the script changed before their gradients were averaged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../buckets/param_grad.h"

namespace ddpx {

// Hooks of register_post_accumulate_grad_hook() run before the hooks of the reducer. An optimizer
// in such a hook applies the local gradient of a rank. Torch counts changes in place in the version
// of a tensor, but not those of fused optimizers.
// The reducer owns this object, under its mutex.
class EarlyUpdates {
 public:
  // A backward begins. Watches only params with such a hook, until their gradients arrive.
  void watch_hooked(const std::vector<at::Tensor>& params);

  // The gradient of the param has arrived, so its hooks have run.
  void arrive(std::size_t param_index, const at::Tensor& param) {
    if (!hooked_.empty() && hooked_[param_index] && *hooked_[param_index] != version_of(param)) {
      changed_.push_back(param_index);
    }
  }

  // The params that changed before their gradients arrived. Ends the watch.
  std::vector<std::size_t> pop_changed();

  // Ends the watch.
  void clear() {
    hooked_.clear();
    changed_.clear();
  }

 private:
  std::vector<std::optional<uint32_t>> hooked_;  // versions by param; empty if no param has a hook
  std::vector<std::size_t> changed_;
};

}  // namespace ddpx
