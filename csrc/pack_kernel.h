// The hot loop of packing on CPU, without a trip through torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// slot = grad * factor, with the bits of at::mul_out and a scalar. False, and nothing is done, if
// the two are not plain CPU tensors of one floating-point dtype in the same dense layout.
bool pack_scaled_dense(const at::Tensor& grad, const at::Tensor& slot, double factor);

}  // namespace ddpx
