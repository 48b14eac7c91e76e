// Memory of the late device, and host memory that it reads late ("pinned").
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace late {

// A block belongs to the stream that was current when it was allocated. Once freed it is filled
// with bytes that are no numbers, as soon as the tasks that this stream had then have run, and
// likewise those of streams for which the block was recorded. A task of any other stream that still
// uses the block meets these bytes.
c10::Allocator& device_memory();

// Freed blocks stay as they are until recorded streams have come by.
c10::Allocator& pinned_memory();
bool is_pinned(const void* data);

// `stream` uses the block that `data` lies in, too.
void record_use(const void* data, const c10::Stream& stream);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);

}  // namespace late
