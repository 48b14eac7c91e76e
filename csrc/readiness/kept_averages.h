// Params that still have the gradient of the last averaged backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpx {

// A mean over ranks does not change what all ranks have, so an average that stays in `param.grad`
// may be averaged again. A sum over ranks would multiply it. The version of a tensor, which torch
// increases with each change in place, shows that nothing has cleared the gradient.
// The reducer owns this object, under its mutex.
class KeptAverages {
 public:
  bool empty() const {
    return averages_.empty();
  }

  // The present gradients of all params are averages; or of these params.
  void record(const std::vector<at::Tensor>& params);
  void record(const std::vector<at::Tensor>& params, const std::vector<std::size_t>& param_indices);

  // The params whose gradient is unchanged since record(). Forgets all.
  std::vector<std::size_t> pop_unchanged(const std::vector<at::Tensor>& params);

 private:
  struct Average {
    std::size_t param_index;
    c10::weak_intrusive_ptr<c10::TensorImpl> grad;  // keeps its address from reuse
    uint32_t version;
  };

  std::vector<Average> averages_;
};

}  // namespace ddpx
