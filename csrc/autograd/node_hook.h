// The common base of the hooks on nodes of an autograd graph.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include "../errors.h"

namespace ddpx {

// `Base` is torch's FunctionPreHook or FunctionPostHook. Compiled autograd asks each hook for its
// part of the trace before it runs the graph: the hook then raises an error.
template <typename Base>
class NodeHook : public Base {
 public:
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const final {
    throw UserError(
        "[ddpx] compiled autograd cannot trace a backward through ReducerDDP, because the hooks of "
        "the reducer run in C++ while gradients arrive. Run this backward without compiled "
        "autograd: set torch._dynamo.config.compiled_autograd = False. torch.compile() of the "
        "model "
        "works without compiled autograd.");
  }
};

}  // namespace ddpx
