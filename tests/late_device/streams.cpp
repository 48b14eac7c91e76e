#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <vector>

#include "capture.h"
#include "counters.h"

namespace late {
namespace {

constexpr std::size_t kPoolSize = 4;

struct Device {
  std::vector<Queue*> queues;  // by stream id; 0 is the default stream
  std::vector<int64_t> pool;
  std::size_t next_in_pool = 0;
};

struct Registry {
  std::mutex mutex;
  std::array<Device, kNumDevices> devices;
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<int64_t, kNumDevices> this_stream{};

int64_t add_queue(Device& device, int index) {
  const auto id = static_cast<int64_t>(device.queues.size());
  device.queues.push_back(new Queue(index, id));
  return id;
}

// The first use of a device creates its default stream.
Device& device_at(Registry& registry, c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kNumDevices, "there is no device late:", int(index));
  auto& device = registry.devices[static_cast<std::size_t>(index)];
  if (device.queues.empty()) {
    add_queue(device, index);
  }
  return device;
}

c10::Stream stream_at(c10::Device device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

}  // namespace

c10::Device current_device() {
  return {kType, this_device};
}

c10::Device set_current_device(c10::Device device) {
  const auto before = current_device();
  if (device.has_index()) {
    TORCH_CHECK(device.index() < kNumDevices, "there is no device ", device);
    this_device = device.index();
  }
  return before;
}

c10::Device indexed(c10::Device device) {
  return device.has_index() ? device : current_device();
}

c10::Stream default_stream(c10::Device device) {
  return stream_at(indexed(device), 0);
}

c10::Stream current_stream(c10::Device device) {
  const auto place = indexed(device);
  return stream_at(place, this_stream[static_cast<std::size_t>(place.index())]);
}

c10::Stream set_current_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device());
  this_stream[static_cast<std::size_t>(stream.device_index())] = stream.id();
  return before;
}

c10::Stream new_stream(c10::Device device) {
  const auto place = indexed(device);
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  return stream_at(place, add_queue(device_at(r, place.index()), place.index()));
}

c10::Stream stream_from_pool(c10::Device device) {
  const auto place = indexed(device);
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  auto& d = device_at(r, place.index());
  if (d.pool.size() < kPoolSize) {
    d.pool.push_back(add_queue(d, place.index()));
    return stream_at(place, d.pool.back());
  }
  return stream_at(place, d.pool[d.next_in_pool++ % kPoolSize]);
}

Queue& queue_of(c10::Stream stream) {
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  return *device_at(r, stream.device_index()).queues.at(static_cast<std::size_t>(stream.id()));
}

Queue& current_queue(c10::Device device) {
  return queue_of(current_stream(device));
}

std::vector<Queue*> queues_of(c10::Device device) {
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  return device_at(r, indexed(device).index()).queues;
}

void synchronize_stream(c10::Stream stream) {
  auto& queue = queue_of(stream);
  check_host_wait(queue);
  count_synchronisation();
  queue.wait(queue.last());
  throw_failure();
}

void synchronize_device(c10::Device device) {
  for (auto* queue : queues_of(device)) {
    check_host_wait(*queue);
  }
  count_synchronisation();
  for (auto* queue : queues_of(device)) {
    queue->wait(queue->last());
  }
  throw_failure();
}

}  // namespace late
