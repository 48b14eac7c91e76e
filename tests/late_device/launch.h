// Queues work on tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <functional>
#include <string>
#include <vector>

#include "counters.h"
#include "queue.h"

namespace late {

// The memory of a tensor of the device, as a tensor on CPU that does not keep the memory alive.
at::Tensor cpu_view(const at::Tensor& tensor);

inline bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// Queues `run`, which uses the memory of these tensors. Counts the operation and the bytes that it
// reads and writes. A tensor that is both read and written must be in both lists.
Position launch(
    const std::string& name,
    Queue& queue,
    const std::vector<at::Tensor>& read,
    const std::vector<at::Tensor>& written,
    std::function<void()> run,
    Kind kind = Kind::kNative);

// Resizes the storage on the current stream, and copies as many bytes as fit.
void resize_storage(const c10::Storage& storage, std::size_t num_bytes);

}  // namespace late
