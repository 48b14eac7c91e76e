// The arithmetic of packing and unpacking a gradient, with the same bits as torch's DDP.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ddpx {

// slot = grad * (1 / divisor), computed in the dtype of the slot. DDP computes the product, not the
// quotient, while it copies. For 3 ranks, product and quotient differ in the last bit. Without a
// divisor, the slot gets a copy of `grad`.
void pack_scaled(const at::Tensor& grad, const at::Tensor& slot, std::optional<int> divisor);

// slot /= divisor, for a gradient that lies in its slot already. DDP divides in this case. No
// divisor, and a divisor of 1, change no bit.
void divide_in_place(const at::Tensor& slot, std::optional<int> divisor);

// A sparse gradient without entries, with the layout that the backward of an embedding makes.
at::Tensor empty_sparse_grad(const at::Tensor& param, at::ScalarType dtype);

}  // namespace ddpx
