#include "sparse_rows.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace ddpx {

std::optional<int64_t> row_outside(const at::Tensor& grad, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  const auto used = grad._indices().select(0, 0);
  const auto outside = used.masked_select(at::isin(used, rows).logical_not());
  if (outside.numel() == 0) {
    return std::nullopt;
  }
  return outside[0].item<int64_t>();
}

std::optional<int64_t> stray_row(const at::Tensor& rows, int64_t num_rows) {
  const at::NoGradGuard no_grad;
  const auto inside = rows.ge(0).logical_and(rows.lt(num_rows));
  const auto before = at::cat({rows.new_full({1}, -1), rows}).slice(0, 0, rows.numel());
  const auto stray = rows.masked_select(inside.logical_and(rows.gt(before)).logical_not());
  return stray.numel() == 0 ? std::nullopt : std::optional(stray[0].item<int64_t>());
}

at::Tensor values_at_rows(const at::Tensor& grad, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  const auto entries = grad._values();
  auto sizes = entries.sizes().vec();
  sizes[0] = rows.numel();
  auto values = at::zeros(sizes, entries.options());
  return values.index_add_(0, at::searchsorted(rows, grad._indices().select(0, 0)), entries);
}

at::Tensor sparse_from_rows(at::Tensor values, const at::Tensor& rows, const at::Tensor& like) {
  const at::NoGradGuard no_grad;
  auto sparse = at::sparse_coo_tensor(rows.unsqueeze(0), std::move(values), like.sizes());
  return sparse._coalesced_(true);
}

}  // namespace ddpx
