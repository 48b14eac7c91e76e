// How `param.grad` is replaced.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// Sets `param.grad`. Safe while another thread accumulates into it: threads that train one wrapper
// at the same time get errors, and must not corrupt memory.
void replace_grad(const at::Tensor& param, at::Tensor grad);

}  // namespace ddpx
