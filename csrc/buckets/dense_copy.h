// The hot loops of packing and unpacking on CPU. They bypass torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// Both functions return false, and do nothing, unless both tensors are holds_values_on_cpu(), and
// have one dtype and the same dense layout.

// slot = grad * factor, with the same bits as at::mul_out with a scalar; floating-point dtypes
// only.
bool pack_scaled_dense(const at::Tensor& grad, const at::Tensor& slot, double factor);

// to = from; autograd sees an in-place operation. False, too, if `to` is an inference tensor.
bool copy_dense(const at::Tensor& from, const at::Tensor& to);

}  // namespace ddpx
