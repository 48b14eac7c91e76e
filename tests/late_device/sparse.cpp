// Sparse tensors of the device: those operators that sparse gradients need.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <torch/library.h>

namespace late {
namespace {

// As on CUDA, the quotient has memory of its own.
at::Tensor div_sparse(const at::Tensor& self, const at::Tensor& divisor) {
  const auto quotient = at::_sparse_coo_tensor_unsafe(
      self._indices().clone(), self._values().div(divisor), self.sizes());
  return quotient._coalesced_(self.is_coalesced());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl(
      "_sparse_coo_tensor_with_dims_and_tensors",
      at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("div.Tensor", div_sparse);
}

}  // namespace
}  // namespace late
