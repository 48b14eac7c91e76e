// What may stand in the all-reduce's place: a user's hook, or one of the built-in ones.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <memory>
#include <stdexcept>

#include "collective.h"

namespace ddpx {

// Gets a bucket with undivided gradients; what its future brings becomes the gradients. Called with
// the reducer's mutex held and without the GIL.
using CommHook = c10d::CommHookInterface;

// What a user's hook raised, and no collective call raises: no lost rank is behind it.
class HookError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// torch's built-in hooks, written anew because torch does not export its own:
// ALLREDUCE divides and sums; FP16_COMPRESS does so in half precision.
std::shared_ptr<CommHook> make_builtin_hook(
    c10d::BuiltinCommHookType type, c10::intrusive_ptr<c10d::ProcessGroup> group);

// Sums buckets in `dtype`, then divides: what mixed_precision does. Sparse and complex gradients,
// whose buckets are not in `dtype`, are cast first.
std::shared_ptr<CommHook> make_reduced_precision_hook(
    at::ScalarType dtype, c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace ddpx
