#include "settings.h"

#include <sstream>
#include <string>

#include "../buckets/sparse_rows.h"
#include "../count.h"
#include "step_errors.h"

namespace ddpx {
namespace {

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.scalar_type() << " with " << count(tensor.dim(), "dimension") << " on "
      << tensor.device();
  return out.str();
}

void check_rows(const Params& params, std::size_t param_index, const at::Tensor& rows) {
  if (param_index >= params.size()) {
    throw errors::no_such_param(param_index, params.size());
  }
  const auto& name = params.name(param_index);
  const auto& meta = params.metas()[param_index];
  if (!meta.expect_sparse) {
    throw InternalError("rows for " + name + ", which is not sparse");
  }
  if (rows.scalar_type() != at::kLong || rows.layout() != at::kStrided || rows.dim() != 1 ||
      rows.device() != meta.device) {
    throw UserError(
        "the row indices of parameter '" + name + "' are a tensor of dtype " + layout_of(rows) +
        ". Pass an int64 tensor with 1 dimension, on the device of the parameter.");
  }
  // Torch does not check the indices of a sparse tensor, and writes wherever they point.
  const auto& param = params[param_index];
  if (const auto row = stray_row(rows, param.dim() == 0 ? 0 : param.size(0))) {
    throw UserError(
        "row index " + std::to_string(*row) + " of parameter '" + name +
        "' is not valid: the row does not exist, or the index is not greater than the previous "
        "index. Pass each existing row at most once, in ascending order.");
  }
}

}  // namespace

void ReducerSettings::set_divisor(std::optional<int> new_divisor) {
  if (new_divisor && *new_divisor < 1) {
    throw errors::not_positive("the divisor of gradients", *new_divisor);
  }
  divisor = new_divisor;
}

void ReducerSettings::set_sparse_rows(
    const Params& params, const std::map<std::size_t, at::Tensor>& rows) {
  for (const auto& [param_index, rows_of_param] : rows) {
    check_rows(params, param_index, rows_of_param);
  }
  for (const auto& [param_index, rows_of_param] : rows) {
    sparse_rows[param_index] = rows_of_param;
  }
}

}  // namespace ddpx
