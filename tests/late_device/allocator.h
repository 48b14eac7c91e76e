// Memory of the device, and pinned host memory, with the contract of CUDA's caching allocators.
#pragma once

#include <c10/core/Allocator.h>

#include "queue.h"

namespace late {

// The device allocator. A block belongs to the stream that was current at its allocation. A freed
// block is filled with NaN, in the order of its stream, and serves the next allocations on that
// stream: a smaller allocation takes a part of the smallest block that fits, and free parts become
// one block again. If another stream still uses the block, it is filled at once. If memory was
// recorded on other streams, the block is reused only after these streams have run the work that
// they had when it was freed. New memory is NaN, too. Thread-safe. Never destroyed.
c10::Allocator* device_allocator();

// Pinned host memory. Freed memory is not reused until the copies that use it are done.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// Records that the task at `position` of the queue uses the memory. Ignores memory that neither of
// the allocators has allocated.
void record_use(const c10::DataPtr& memory, Queue& queue, Position position);

// Bytes in tensors that are alive.
int64_t num_bytes_in_use(int device);

// See torch.Tensor.record_stream.
void record_on(const c10::DataPtr& memory, Queue& queue);

}  // namespace late
