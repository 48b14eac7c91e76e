// Gradients of torch's distributed autograd, which lie in a context in the place of `param.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <cstddef>
#include <vector>

namespace ddpx {

// Moves the gradients of a distributed backward into `param.grad`, where they are averaged, and
// back into the context. Without a distributed backward, pull() only reads a thread-local pointer.
// The reducer owns this object, under its mutex.
class DistributedGrads {
 public:
  // To be called in the hook of an accumulator. If a distributed backward runs the hook,
  // `param.grad` becomes the gradient in the context, until push_all().
  void pull(std::size_t param_index, const at::Tensor& param);

  // The context gets each pulled gradient back, with its present value. `param.grad` becomes what
  // it was before.
  void push_all();

  // `param.grad` becomes what it was before. Takes no lock of the context, as the context may be
  // destroying the graph task that reports its abort.
  void drop_all();

 private:
  struct Pulled {
    std::size_t param_index;
    at::Tensor param;
    at::Tensor previous;
    torch::distributed::autograd::ContextPtr context;
  };

  std::vector<Pulled> pulled_;
};

}  // namespace ddpx
