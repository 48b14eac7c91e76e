// The interface that c10 and the accelerator API require of a device: guards, streams, events,
// hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>

#include "allocator.h"
#include "capture.h"
#include "counters.h"
#include "ignored.h"
#include "launch.h"
#include "settings.h"
#include "streams.h"

namespace late {
namespace {

// One recording of an event. Shared, since streams may wait for a recording that was replaced.
struct Recording {
  Queue* queue;
  bool captured;
  Position position = 0;
  std::atomic<int64_t> time_ns{0};
};

struct Event {
  std::shared_ptr<Recording> recording;
  bool timed;
};

Event* as_event(void* event) {
  return static_cast<Event*>(event);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return set_current_device(device);
  }
  c10::Device getDevice() const override {
    return current_device();
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device);
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return stream_from_pool(device);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return set_current_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    check_host_wait(queue);
    return queue.passed(queue.last());
  }
  // Without "override", since torch 2.11 lacks this function.
  bool isStreamCapturing(const c10::Stream& stream) const {
    return is_captured(queue_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!ignored(Wait::kHost)) {
      synchronize_stream(stream);
    }
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (!ignored(Wait::kHost)) {
      synchronize_device({kType, index});
    }
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex /*index*/,
      const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
      count_event();
    }
    auto& queue = queue_of(stream);
    const auto recording = std::make_shared<Recording>();
    recording->queue = &queue;
    recording->captured = is_captured(queue);
    recording->position = queue.push("event", [recording] {
      recording->time_ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
              .count();
    });
    as_event(*event)->recording = recording;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || !as_event(event)->recording || ignored(Wait::kStream)) {
      return;
    }
    const auto recording = as_event(event)->recording;
    auto& queue = queue_of(stream);
    if (recording->queue != &queue) {
      check_wait(queue, *recording->queue);
      queue.push("wait", [recording] { recording->queue->wait(recording->position); });
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || !as_event(event)->recording) {
      return true;
    }
    const auto& recording = *as_event(event)->recording;
    check_host_wait(recording.captured);
    return recording.queue->passed(recording.position);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || !as_event(event)->recording || ignored(Wait::kHost)) {
      return;
    }
    const auto recording = as_event(event)->recording;
    check_host_wait(recording->captured);
    count_synchronisation();
    recording->queue->wait(recording->position);
    throw_failure();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(as_event(from)->timed && as_event(to)->timed, "an event was made without timing");
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "the device has not come to both events");
    return 1e-6 * static_cast<double>(
                      as_event(to)->recording->time_ns - as_event(from)->recording->time_ns);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete as_event(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (!ignored(Wait::kRecord)) {
      record_on(memory, queue_of(stream));
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kNumDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device({kType, index});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device().index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return set_current_device({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 || index >= kNumDevices ? getCurrentDevice() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

struct Registration {
  Registration() {
    c10::SetAllocator(kType, device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
};
const Registration registration;

}  // namespace
}  // namespace late
