// The dtypes of gradients, which may differ from the dtypes of their params.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ddpx {

// The dtypes of the gradients of params of one dtype.
struct GradDtypes {
  at::ScalarType param;
  at::ScalarType arriving;  // from autograd; gradients in the dtype of the param may arrive, too
  at::ScalarType summed;    // in the buckets
  at::ScalarType local;     // of `param.grad` while further parts may arrive
  at::ScalarType averaged;  // of `param.grad` after the step
};

// The dtypes that the user asked for. nullopt stands for the dtype of the param. Integer dtypes
// never change.
struct Precision {
  std::optional<at::ScalarType> compute = std::nullopt;   // of arriving gradients
  std::optional<at::ScalarType> reduce = std::nullopt;    // in the buckets
  std::optional<at::ScalarType> local = std::nullopt;     // of accumulating gradients, if wider
  std::optional<at::ScalarType> averaged = std::nullopt;  // of `param.grad` after the step

  GradDtypes of(at::ScalarType param) const;
};

// Differentiable cast of `param` to `dtype`. If `grad_dtype` of the param is None, the gradient
// reaches the param without a cast.
at::Tensor lowered(const at::Tensor& param, at::ScalarType dtype);

// Casts the gradient of the param, if there is one.
void cast_grad(const at::Tensor& param, at::ScalarType dtype);

}  // namespace ddpx
