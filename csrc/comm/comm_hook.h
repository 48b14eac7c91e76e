// Communication hooks, which replace the all-reduce: built-in ones, and the user's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <memory>
#include <stdexcept>

#include "collective.h"

namespace ddpx {

// Gets a bucket with undivided gradients. The result of its future becomes the gradients. Called
// without the mutex of the reducer and without the GIL.
using CommHook = c10d::CommHookInterface;

// An error of the user's hook that no collective call raises: it is not caused by a lost rank.
class HookError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The tensor in the value of a future: a tensor, or the first one of a list, also of a Python
// object. Undefined if there is none.
at::Tensor tensor_in(const c10::IValue& value);

// torch's built-in hooks, implemented here because torch does not export them. ALLREDUCE divides
// and sums. FP16_COMPRESS divides and sums in half precision.
std::shared_ptr<CommHook> make_builtin_hook(
    c10d::BuiltinCommHookType type, c10::intrusive_ptr<c10d::ProcessGroup> group);

// Sums buckets in `dtype`, then divides, for mixed_precision. Casts sparse and complex gradients
// first, because their buckets do not have `dtype`.
std::shared_ptr<CommHook> make_reduced_precision_hook(
    at::ScalarType dtype, c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace ddpx
