// The communication hooks that ddpx has itself.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <memory>

#include "comm_hook.h"

namespace ddpx {

// torch's built-in hooks, implemented here because torch does not export them. ALLREDUCE divides
// and sums. FP16_COMPRESS divides and sums in half precision.
std::shared_ptr<CommHook> make_builtin_hook(
    c10d::BuiltinCommHookType type, c10::intrusive_ptr<c10d::ProcessGroup> group);

// Sums buckets in `dtype`, then divides, for mixed_precision. Casts sparse and complex gradients
// first, because their buckets do not have `dtype`.
std::shared_ptr<CommHook> make_reduced_precision_hook(
    at::ScalarType dtype, c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace ddpx
