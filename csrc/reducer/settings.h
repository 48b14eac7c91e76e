// Settings of a reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "../comm/comm_hook.h"
#include "params.h"

namespace ddpx {

// `comm_hook`, `comm_hook_is_registered`, `check_finite` and `manual_finalization` change between
// steps only. The other settings may change at any time. A step reads `divisor` and `sparse_rows`
// when the step begins. The reducer reads `after_sync` when a step has ended. The context owns the
// settings, under its mutex.
struct ReducerSettings {
  // UserError unless 1 or more.
  void set_divisor(std::optional<int> new_divisor);

  // Rows by param index. After an error, no rows have changed. UserError if a param does not exist,
  // or if its rows are not ascending row indices of the param. InternalError if the gradient of a
  // param is not expected to be sparse.
  void set_sparse_rows(const Params& params, const std::map<std::size_t, at::Tensor>& rows);

  std::shared_ptr<CommHook> comm_hook;
  bool comm_hook_is_registered = false;  // by the script; otherwise it is of mixed precision
  std::optional<int> divisor;            // the world size, if nullopt
  std::map<std::size_t, at::Tensor> sparse_rows;  // by param index
  bool check_finite = false;
  bool manual_finalization = false;  // finalize_backward() ends a step, not the end of backward
  std::function<void()> after_sync;  // called after each synchronized backward, if set
};

}  // namespace ddpx
