#include "low_precision.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/custom_function.h>

#include "device_stream.h"
#include "param_grad.h"

namespace ddpx {
namespace {

// Casts in forward. Its backward leaves the gradient in the dtype in which it arrives.
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

GradDtypes Precision::of(at::ScalarType param) const {
  if (!at::isFloatingType(param)) {
    return {param, param, param, param, param};
  }
  return {
      param,
      compute.value_or(param),
      reduce.value_or(param),
      c10::promoteTypes(param, local.value_or(param)),
      averaged.value_or(param)};
}

at::Tensor lowered(const at::Tensor& param, at::ScalarType dtype) {
  return Lower::apply(param, dtype);
}

void cast_grad(const at::Tensor& param, at::ScalarType dtype) {
  const auto& grad = grad_of(param);
  if (!grad.defined() || grad.scalar_type() == dtype) {
    return;
  }
  keep_for_current_stream(grad);
  replace_grad(param, grad.to(dtype));
}

}  // namespace ddpx
