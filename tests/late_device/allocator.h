// Memory of the device, and pinned host memory, with the contract of CUDA's caching allocators.
#pragma once

#include <c10/core/Allocator.h>

#include "queue.h"

namespace late {

// A block belongs to the stream that was current when it was allocated. When it is freed it goes to
// the next allocation on that stream, in the stream's order, and is filled with NaN before: at once
// if another stream still has work with it. If memory was recorded on other streams, all that is
// put off until they have done what they had to do when it was freed. Memory is NaN when it is new.
// Thread-safe, and never destroyed.
c10::Allocator* device_allocator();

// Pinned host memory. When it is freed it is put aside until copies that use it are done.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// The task at `ticket` of the queue uses the memory, of either kind; other memory is left alone.
void note_use(const c10::DataPtr& memory, Queue& queue, Ticket ticket);

// In tensors that are alive.
int64_t num_bytes_in_use(int device);

// As torch.Tensor.record_stream.
void record_on(const c10::DataPtr& memory, Queue& queue);

}  // namespace late
