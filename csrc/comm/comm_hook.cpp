#include "comm_hook.h"

#include <vector>

namespace ddpx {

at::Tensor tensor_in(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor();
  }
  const auto tensors = value.isPyObject()     ? value.toPyObjectHolder()->extractTensors()
                       : value.isTensorList() ? value.toTensorVector()
                                              : std::vector<at::Tensor>();
  return tensors.empty() ? at::Tensor() : tensors.front();
}

}  // namespace ddpx
