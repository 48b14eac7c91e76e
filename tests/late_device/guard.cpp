// What torch asks of a device: guards, streams and events, and hooks of an accelerator.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "guard.h"
#include "ignored_waits.h"
#include "memory.h"
#include "streams.h"

namespace late {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> capturing{false};

struct Event {
  Point point;
  std::shared_ptr<Clock::time_point> time = std::make_shared<Clock::time_point>();
};

class LateGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(c10::kPrivateUse1, current_device());
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kPrivateUse1, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return end_of(stream).passed();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    end_of(stream).wait();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize(device);
  }
  bool isStreamCapturing(const c10::Stream&) const {  // virtual since torch 2.12
    return capturing;
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto& recorded = *static_cast<Event*>(*event);
    recorded.time = std::make_shared<Clock::time_point>();
    auto& queue = queue_of(stream);
    const auto number =
        queue.submit(TaskQueue::Kind::kSignal, [time = recorded.time] { *time = Clock::now(); });
    recorded.point = {&queue, number};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && !is_ignored()) {
      make_wait(stream, static_cast<Event*>(event)->point);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->point.passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->point.wait();
    }
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    synchronizeEvent(begin);
    synchronizeEvent(end);
    const std::chrono::duration<double, std::milli> elapsed =
        *static_cast<Event*>(end)->time - *static_cast<Event*>(begin)->time;
    return elapsed.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (!is_ignored()) {
      record_use(data.get(), stream);
    }
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

class LateHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kNumDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard);

}  // namespace

void register_device() {
  c10::SetAllocator(c10::kPrivateUse1, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new LateHooks());
}

void set_capturing(bool value) {
  capturing = value;
}

}  // namespace late
