// The arithmetic of packing and unpacking a gradient, with the same bits as torch's DDP.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// In all functions, a divisor of 1 changes no bit.

// slot = grad * (1 / divisor), computed in the dtype of the slot. DDP computes the product, not the
// quotient, while it copies. For 3 ranks, product and quotient differ in the last bit.
void pack_scaled(const at::Tensor& grad, const at::Tensor& slot, int divisor);

// slot /= divisor, for a gradient that lies in its slot already. DDP divides in this case.
void divide_in_place(const at::Tensor& slot, int divisor);

// A sparse gradient without entries, with the layout that the backward of an embedding makes.
at::Tensor empty_sparse_grad(const at::Tensor& param, at::ScalarType dtype);

}  // namespace ddpx
