// Shows whether a script has changed `param.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpx {

// The gradients of params at one moment. Torch increases the version of a tensor with each change
// in place. A gradient has changed if its version has, or if `param.grad` is another tensor.
// The reducer, or a step, owns this object, under the reducer's mutex.
class GradVersions {
 public:
  bool empty() const {
    return grads_.empty();
  }

  // Takes the present gradients of all params, or of the params with these indices.
  void record(const std::vector<at::Tensor>& params);
  void record(const std::vector<at::Tensor>& params, const std::vector<std::size_t>& param_indices);

  // The params whose gradient is unchanged since record(), or the other params that had a gradient
  // then. Both functions forget all gradients.
  std::vector<std::size_t> pop_unchanged(const std::vector<at::Tensor>& params);
  std::vector<std::size_t> pop_changed(const std::vector<at::Tensor>& params);

 private:
  struct Grad {
    std::size_t param_index;
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // keeps its address from reuse
    uint32_t version;
  };

  std::vector<std::size_t> pop(const std::vector<at::Tensor>& params, bool changed);

  std::vector<Grad> grads_;
};

}  // namespace ddpx
