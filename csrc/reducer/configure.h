// Settings and observers of a reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "../buckets/low_precision.h"
#include "../comm/comm_hook.h"
#include "../observe/recording.h"
#include "reducer.h"

namespace ddpx {

// Passes every bucket to `hook` instead of the all-reduce. UserError within a backward, and if
// there is a hook already.
void set_comm_hook(Reducer& reducer, std::shared_ptr<CommHook> hook);

// Gradients arrive in one dtype and are summed in another by `hook`, which takes the place of a
// communication hook. Between backwards `param.grad` has the dtype of the param. UserError as for
// set_comm_hook().
void set_mixed_precision(Reducer& reducer, Precision precision, std::shared_ptr<CommHook> hook);

// From the next step on, gradients are divided by this, or by the world size if nullopt.
void set_divisor(Reducer& reducer, std::optional<int> divisor);

// Rows by param index. From the next step on, the sparse gradient of such a param has entries in
// these rows only, on every rank; see GradBuffer::set_rows(). UserError if a gradient is not
// expected to be sparse.
void set_sparse_rows(Reducer& reducer, const std::map<std::size_t, at::Tensor>& rows);

// Whether backward raises, on every rank, if a gradient of any rank is not finite. Costs an
// all-reduce of a few bytes per step. All ranks must set the same. UserError within a backward.
void set_check_finite(Reducer& reducer, bool enabled);

// `after_sync` is called after each synchronized backward, on the thread that ends it.
void set_after_sync(Reducer& reducer, std::function<void()> after_sync);

// From now on `recording` gets the events of steps. UserError within a backward.
void add_recording(Reducer& reducer, std::shared_ptr<Recording> recording);
void remove_recording(Reducer& reducer, const std::shared_ptr<Recording>& recording);

// The times of one step in `sample_rate` are measured. UserError unless 1 or more.
void set_sample_rate(Reducer& reducer, int64_t sample_rate);

// All ranks have just constructed the wrapper together, which gives it its number in the group.
void number_as_constructed(Reducer& reducer);

// The script has waited for the averages of the last step, before it applies them.
void mark_waited(Reducer& reducer);

}  // namespace ddpx
