// The devices and streams, and those that are current on the calling thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "queue.h"

namespace late {

constexpr int kNumDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device current_device();
c10::Device set_current_device(c10::Device device);  // returns the previous device

// -1 means the current device.
c10::Device indexed(c10::Device device);

c10::Stream default_stream(c10::Device device);
c10::Stream current_stream(c10::Device device);
c10::Stream set_current_stream(c10::Stream stream);  // returns that device's previous stream

c10::Stream new_stream(c10::Device device);
c10::Stream stream_from_pool(c10::Device device);

Queue& queue_of(c10::Stream stream);
Queue& current_queue(c10::Device device);
std::vector<Queue*> queues_of(c10::Device device);

// Blocks the host, counts as a synchronization, and throws the exception of a task.
void synchronize_stream(c10::Stream stream);
void synchronize_device(c10::Device device);

}  // namespace late
