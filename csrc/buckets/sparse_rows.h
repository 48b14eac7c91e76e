// Converts a sparse gradient to a dense block of rows that all ranks know beforehand, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace ddpx {

// `rows` is an int64 tensor, ascending and without repetition, on the device of the gradient.

// The first of `rows` that is out of order, or out of the range of a param with `num_rows` rows.
// nullopt if there is none.
std::optional<int64_t> stray_row(const at::Tensor& rows, int64_t num_rows);

// A row that has entries in `grad` but is not in `rows`; nullopt if there is none.
std::optional<int64_t> row_outside(const at::Tensor& grad, const at::Tensor& rows);

// The rows of `grad` as a tensor of shape [number of rows, ...], with zeros where `grad` has no
// entry.
at::Tensor values_at_rows(const at::Tensor& grad, const at::Tensor& rows);

// The inverse of values_at_rows(): a sparse tensor with the sizes of `like`.
at::Tensor sparse_from_rows(at::Tensor values, const at::Tensor& rows, const at::Tensor& like);

}  // namespace ddpx
