#include "low_precision.h"

#include <torch/csrc/autograd/custom_function.h>

#include "device_stream.h"

namespace ddpx {
namespace {

// Casts forward, and leaves the gradient in the dtype in which it arrives.
class Lower : public torch::autograd::Function<Lower> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& param, at::ScalarType dtype) {
    context->set_materialize_grads(false);
    return param.to(dtype);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/, torch::autograd::variable_list grads) {
    return {grads.front(), at::Tensor()};
  }
};

}  // namespace

at::Tensor lowered(const at::Tensor& param, at::ScalarType dtype) {
  return Lower::apply(param, dtype);
}

void cast_grad_to_own_dtype(const at::Tensor& param) {
  auto& grad = param.mutable_grad();
  if (!grad.defined() || grad.scalar_type() == param.scalar_type()) {
    return;
  }
  keep_for_current_stream(grad);
  grad = grad.to(param.scalar_type());
}

}  // namespace ddpx
