// The hot loops of packing and unpacking on CPU, without a trip through torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// Both return false, and do nothing, unless the two are plain CPU tensors of one dtype in the same
// dense layout.

// slot = grad * factor, with the bits of at::mul_out and a scalar. For floating-point dtypes.
bool pack_scaled_dense(const at::Tensor& grad, const at::Tensor& slot, double factor);

// to = from, as an operation in place of autograd's.
bool copy_dense(const at::Tensor& from, const at::Tensor& to);

}  // namespace ddpx
