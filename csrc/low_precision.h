// Mixed precision: dtypes that stand in for the params' own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ddpx {

struct Precision {
  std::optional<at::ScalarType> compute;  // of gradients as they arrive; the params' own if nothing
  std::optional<at::ScalarType> reduce;  // of the buffers that are summed; the params' own likewise
};

// `param` in `dtype`, as a tensor of autograd's. Its gradient goes to the param without a cast
// where the param's `grad_dtype` is None.
at::Tensor lowered(const at::Tensor& param, at::ScalarType dtype);

// Gives a gradient that is in another dtype the param's own.
void cast_grad_to_own_dtype(const at::Tensor& param);

}  // namespace ddpx
