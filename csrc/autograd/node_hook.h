// What the hooks on nodes of a graph have in common.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include "../errors.h"

namespace ddpx {

// Base of the hooks on nodes; `Base` is torch's FunctionPreHook or FunctionPostHook. Compiled
// autograd asks each hook for its part of the trace, before it runs anything.
template <typename Base>
class NodeHook : public Base {
 public:
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const final {
    throw errors::under_compiled_autograd();
  }
};

}  // namespace ddpx
