// The dtypes of gradients, where they differ from those of their params.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ddpx {

// Of the gradients of one param, or of several of one dtype.
struct GradDtypes {
  at::ScalarType param;
  at::ScalarType arriving;  // as autograd brings them; the param's own is accepted, too
  at::ScalarType summed;    // in the buffers that ranks sum
  at::ScalarType local;     // of param.grad while more is to be added to it
  at::ScalarType averaged;  // of param.grad behind the sum
};

// What the user asked for; a param's own dtype where there is nothing. Integers stay as they are.
struct Precision {
  std::optional<at::ScalarType> compute = std::nullopt;   // as gradients arrive
  std::optional<at::ScalarType> reduce = std::nullopt;    // as they are summed
  std::optional<at::ScalarType> local = std::nullopt;     // as they accumulate, if wider
  std::optional<at::ScalarType> averaged = std::nullopt;  // as the user gets them

  GradDtypes of(at::ScalarType param) const;
};

// `param` in `dtype`, as a tensor of autograd's. Its gradient goes to the param without a cast
// where the param's `grad_dtype` is None.
at::Tensor lowered(const at::Tensor& param, at::ScalarType dtype);

// Gives the param's gradient, if there is one, another dtype.
void cast_grad(const at::Tensor& param, at::ScalarType dtype);

}  // namespace ddpx
