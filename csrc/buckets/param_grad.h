// How `param.grad` is read and replaced.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// `param.grad` of a leaf. at::Tensor::grad() first asks whether the tensor is a leaf, which takes
// five times as long.
inline const at::Tensor& grad_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();
}

// Sets `param.grad`. Safe while another thread accumulates into it: threads that train one wrapper
// at the same time get errors, and must not corrupt memory.
void replace_grad(const at::Tensor& param, at::Tensor grad);

}  // namespace ddpx
