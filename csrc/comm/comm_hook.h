// Communication hooks, which replace the all-reduce.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <stdexcept>
#include <vector>

#include "collective.h"

namespace ddpx {

// Gets a bucket with undivided gradients. The result of its future becomes the gradients. Called
// without the mutex of the reducer and without the GIL.
using CommHook = c10d::CommHookInterface;

// An error of the user's hook that no collective call raises: it is not caused by a lost rank.
class HookError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The tensor in the value of a future: a tensor, or the first one of a list, also of a Python
// object. Undefined if there is none.
inline at::Tensor tensor_in(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor();
  }
  const auto tensors = value.isPyObject()     ? value.toPyObjectHolder()->extractTensors()
                       : value.isTensorList() ? value.toTensorVector()
                                              : std::vector<at::Tensor>();
  return tensors.empty() ? at::Tensor() : tensors.front();
}

}  // namespace ddpx
