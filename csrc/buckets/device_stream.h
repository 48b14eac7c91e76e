// Streams of a device of any type, by c10's guards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace ddpx {

// The current stream of `device` on this thread; nullopt for CPU, which has no streams.
std::optional<c10::Stream> current_stream(c10::Device device);

// Whether the current stream is captured, for example into a CUDA graph. False for CPU, and for
// torch 2.11, which cannot tell.
bool is_capturing(c10::Device device);

// Keeps the memory of the tensor until the stream has passed this point, also if the last reference
// to the tensor ends before.
void keep_for_stream(const at::Tensor& tensor, c10::Stream stream);

// As above, for the current stream. Does nothing on CPU.
void keep_for_current_stream(const at::Tensor& tensor);

// `waiting` waits for all work that is in `awaited` now. The host does not wait.
void wait_for_stream(c10::Stream waiting, c10::Stream awaited);

}  // namespace ddpx
