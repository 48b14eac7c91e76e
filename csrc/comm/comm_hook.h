// Communication hooks, which replace the all-reduce.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <stdexcept>
#include <string>
#include <vector>

namespace ddpx {

// Gets a bucket with undivided gradients. The result of its future becomes the gradients. Called
// without the mutex of the reducer and without the GIL.
using CommHook = c10d::CommHookInterface;

// An error that the user's hook, or a callback of the hook's future, raised.
class HookError : public std::runtime_error {
 public:
  HookError(const std::string& what, bool may_be_of_call)
      : std::runtime_error(what), may_be_of_call_(may_be_of_call) {}

  // Whether a collective call of the hook may have raised it, for example because a rank is lost.
  bool may_be_of_call() const {
    return may_be_of_call_;
  }

  // Raises the hook's own error with `note` added, if that error has another type than this one.
  virtual void raise_own(const std::string& /*note*/) const {}

 private:
  bool may_be_of_call_;
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
