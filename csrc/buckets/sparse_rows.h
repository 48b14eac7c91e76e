// A sparse gradient as a dense block of the rows that ranks agreed on beforehand, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace ddpx {

// `rows` in all of these: int64, ascending, without repetition, on the device of the gradient.

// What makes `rows` none of a param with `num_rows` of them: the first that is out of its range or
// out of order. Nothing if all is well.
std::optional<int64_t> stray_row(const at::Tensor& rows, int64_t num_rows);

// A row that `grad` has entries for, but `rows` lacks; nothing if there is none.
std::optional<int64_t> row_outside(const at::Tensor& grad, const at::Tensor& rows);

// [number of rows, ...]: the entries of `grad` row by row, zeros where it has none.
at::Tensor values_at_rows(const at::Tensor& grad, const at::Tensor& rows);

// The inverse, as a sparse tensor with the sizes of `like`.
at::Tensor sparse_from_rows(at::Tensor values, const at::Tensor& rows, const at::Tensor& like);

}  // namespace ddpx
