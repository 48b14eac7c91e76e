// Streams of a device of any type, through c10's guards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace ddpx {

// The current stream of `device` on this thread; nullopt for CPU, which has none.
std::optional<c10::Stream> current_stream(c10::Device device);

// Whether the current stream is being captured, into a CUDA graph for instance. False for CPU, and
// with a torch that cannot tell.
bool is_capturing(c10::Device device);

// The current stream uses the tensor, whose last reference may end before the stream has come by.
void keep_for_current_stream(const at::Tensor& tensor);

// `waiting` waits for all work that is in `awaited` now. The host goes on.
void wait_for_stream(c10::Stream waiting, c10::Stream awaited);

}  // namespace ddpx
