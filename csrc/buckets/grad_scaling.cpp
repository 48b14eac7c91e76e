#include "grad_scaling.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <vector>

#include "dense_copy.h"

namespace ddpx {

void pack_scaled(const at::Tensor& grad, const at::Tensor& slot, std::optional<int> divisor) {
  const auto factor = 1.0 / divisor.value_or(1);
  if (pack_scaled_dense(grad, slot, factor)) {
    return;
  }
  // A complex product with 1 changes signs of zeros, and makes NaN of infinity. DDP of one rank
  // computes this product.
  const bool is_copy = !divisor || (divisor == 1 && !grad.is_complex());
  if (is_copy || grad.scalar_type() != slot.scalar_type()) {
    slot.copy_(grad);  // first, so that the product is rounded in the slot's dtype
    if (factor != 1) {
      slot.mul_(factor);
    }
    return;
  }
  // A wrapped scalar does not take part in type promotion: a bf16 gradient stays bf16.
  const auto scalar = at::native::wrapped_scalar_tensor(factor);
  auto out = slot;
  at::mul_out(out, grad, scalar);
}

void divide_in_place(const at::Tensor& slot, std::optional<int> divisor) {
  if (divisor.value_or(1) != 1) {
    slot.div_(*divisor);
  }
}

at::Tensor empty_sparse_grad(const at::Tensor& param, at::ScalarType dtype) {
  const int64_t sparse_dims = param.dim() == 0 ? 0 : 1;  // a scalar has no rows
  std::vector<int64_t> value_sizes = {0};
  for (int64_t dim = 1; dim < param.dim(); ++dim) {
    value_sizes.push_back(param.size(dim));
  }
  const auto indices =
      at::empty({sparse_dims, 0}, param.options().dtype(at::kLong).requires_grad(false));
  const auto values = at::empty(value_sizes, param.options().dtype(dtype).requires_grad(false));
  return at::sparse_coo_tensor(indices, values, param.sizes());
}

}  // namespace ddpx
