#include "device_marks.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <cstdlib>
#include <utility>

namespace ddpx {
namespace {

// Elapsed times are floats in ms: beyond this distance they are coarser than a microsecond.
constexpr int64_t kFarthestNs = 5'000'000'000;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceMarks::DeviceMarks(c10::Device device) : device_(device), anchor_(device.type()) {
  record(current_stream(device)).synchronize();  // the device is idle, and the code is warm
  const auto begin = steady_now();
  anchor_ = record(current_stream(device));
  anchor_.synchronize();
  error_ns_ = (steady_now() - begin) / 2;
  anchor_ns_ = begin + error_ns_;
}

c10::Event DeviceMarks::record(c10::Stream stream) const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  event.record(stream);
  return event;
}

void DeviceMarks::mark(EventKind kind, uint32_t step, std::size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  marks_.push_back({record(current_stream(device_)), kind, step, index});
}

int64_t DeviceMarks::time_of(const c10::Event& event) const {
  return anchor_ns_ + std::llround(1e6 * anchor_.elapsedTime(event));
}

void DeviceMarks::collect(EventLog& log) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // In the order in which they were made: one that the device has not passed holds up the rest.
  while (!marks_.empty() && marks_.front().event.query()) {
    auto mark = std::move(marks_.front());
    marks_.pop_front();
    const auto time_ns = time_of(mark.event);
    log.add_at(time_ns, mark.kind, mark.step, mark.index);
    if (time_ns - anchor_ns_ > kFarthestNs) {
      anchor_ = std::move(mark.event);
      anchor_ns_ = time_ns;
    }
  }
}

void DeviceMarks::collect_all(EventLog& log) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& mark : marks_) {
      mark.event.synchronize();
    }
  }
  collect(log);
  const auto begin = steady_now();
  auto last = record(current_stream(device_));
  last.synchronize();
  const auto host_ns = begin + (steady_now() - begin) / 2;
  error_ns_ += std::abs(time_of(last) - host_ns);
}

}  // namespace ddpx
