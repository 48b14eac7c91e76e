// Reads and replaces `param.grad`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddpx {

// `param.grad` of a leaf. at::Tensor::grad() first asks whether the tensor is a leaf, which takes
// five times as long.
inline const at::Tensor& grad_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();
}

// The number of in-place changes of the tensor; 0 for an inference tensor or an undefined one.
inline uint32_t version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

// Sets `param.grad`. Safe while another thread accumulates into it: threads that train one wrapper
// at the same time get errors, and must not corrupt memory.
void replace_grad(const at::Tensor& param, at::Tensor grad);

// Makes the dtype of the param the dtype of its gradient, also after a later change of the param's
// dtype. torch itself cannot undo that a script has set `param.grad_dtype`.
void forget_grad_dtype(const at::Tensor& param);

}  // namespace ddpx
