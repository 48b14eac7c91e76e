// The arithmetic of packing and unpacking a gradient, to the bit as torch's DDP does it.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpx {

// In all of these a divisor of 1 leaves every bit as it is.

// slot = grad * (1 / divisor), computed in the slot's dtype. The product, not the quotient, is what
// DDP computes while it copies: for 3 ranks the two differ in the last bit.
void pack_scaled(const at::Tensor& grad, const at::Tensor& slot, int divisor);

// slot /= divisor, for a gradient that lies in its slot already. Here DDP divides.
void divide_in_place(const at::Tensor& slot, int divisor);

// grad / divisor as a new sparse tensor. Out of place, because two gradients may share one
// values tensor (two embeddings whose outputs are added).
at::Tensor divide_sparse(const at::Tensor& grad, int divisor);

// A sparse gradient without entries, of the kind that an embedding's backward makes.
at::Tensor empty_sparse_grad(const at::Tensor& param, at::ScalarType dtype);

// The reduced gradient as a tensor of its own, in `dtype`, laid out as autograd lays
// out a gradient of `param` (the "gradient layout contract" of
// torch/csrc/autograd/functions/accumulate_grad.h).
at::Tensor unpack_new(const at::Tensor& slot, const at::Tensor& param, at::ScalarType dtype);

}  // namespace ddpx
