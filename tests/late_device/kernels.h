// Kernels of the late device, and what they cost.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace late {

// Kernels and copies that were started, and the bytes that they read and write.
struct Costs {
  int64_t num_operations = 0;
  int64_t num_bytes = 0;
};
Costs costs();
void reset_costs();

// A tensor on CPU over the same memory, which it does not own. For tasks: there, a tensor of the
// device's would keep memory alive that a real device knows nothing of.
at::Tensor host_alias(const at::Tensor& tensor);

// Starts a kernel in the current stream of the tensors' device. `tensors`: those that it reads and
// writes, for the costs.
void start(const std::vector<at::Tensor>& tensors, std::function<void()> task);

}  // namespace late
