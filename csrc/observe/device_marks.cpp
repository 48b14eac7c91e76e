#include "device_marks.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "../buckets/device_stream.h"

namespace ddpx {
namespace {

// A mark replaces the anchor when it is this much later than the anchor.
constexpr int64_t kFarthestNs = 5'000'000'000;

constexpr int kReadings = 5;

// Elapsed times are floats in ms, with 24 bits: 0.6 µs at the distance above, 0.4 ms after an hour.
int64_t rounding_of(int64_t elapsed_ns) {
  return (std::abs(elapsed_ns) >> 23) + 1;
}

}  // namespace

DeviceMarks::DeviceMarks(c10::Device device, std::size_t capacity, int64_t (*now)())
    : device_(device), capacity_(capacity), now_(now), anchor_(device.type()) {
  relate();
}

bool DeviceMarks::has_room() const {
  return marks_.size() < capacity_ && !is_capturing(device_);
}

c10::Event DeviceMarks::record() {
  if (spare_.empty()) {
    spare_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  }
  auto event = std::move(spare_.back());
  spare_.pop_back();
  event.record(*current_stream(device_));
  return event;
}

bool DeviceMarks::mark(EventKind kind, uint32_t step, std::size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_room()) {
    return false;
  }
  marks_.push_back({record(), kind, step, index});
  return true;
}

bool DeviceMarks::mark_end(
    c10::ivalue::Future& work, EventKind kind, uint32_t step, std::size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_room()) {
    return false;
  }
  std::vector<c10::Stream> streams = {end_stream(device_)};
  for (const auto device : work.devices()) {
    if (device != device_) {
      streams.push_back(end_stream(device));
    }
  }
  const c10::MultiStreamGuard on_streams(streams);
  work.wait();  // these streams wait, not the host
  for (std::size_t i = 1; i < streams.size(); ++i) {
    wait_for_stream(streams.front(), streams[i]);
  }
  marks_.push_back({record(), kind, step, index});
  return true;
}

c10::Stream DeviceMarks::end_stream(c10::Device device) {
  for (const auto& stream : ends_) {
    if (stream.device() == device) {
      return stream;
    }
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return ends_.emplace_back(guard.getNewStream(device, /*priority=*/-1));
}

int64_t DeviceMarks::time_of(const c10::Event& event) const {
  return anchor_ns_ + std::llround(1e6 * anchor_.elapsedTime(event));
}

// Sets a new anchor: a moment whose time is known on both clocks. Uses the shortest of several
// readings: the first one waits for work that is queued, and another process may use the device.
void DeviceMarks::relate() {
  auto event = record();
  int64_t host_ns = 0;
  int64_t error_ns = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kReadings; ++i) {
    const auto begin = now_();
    auto read = record();
    read.synchronize();
    const auto half_ns = (now_() - begin) / 2;
    if (half_ns < error_ns) {
      std::swap(event, read);
      host_ns = begin + half_ns;
      error_ns = half_ns;
    }
    spare_.push_back(std::move(read));
  }
  if (anchor_.was_marked_for_recording()) {
    const auto found_ns = time_of(event);
    const auto rounding_ns = rounding_of(found_ns - anchor_ns_);
    const auto drift_ns = std::abs(found_ns - host_ns);
    worst_error_ns_ = std::max(worst_error_ns_, anchor_error_ns_ + rounding_ns + drift_ns);
  }
  anchor_ = std::move(event);
  anchor_ns_ = host_ns;
  anchor_error_ns_ = error_ns;
}

void DeviceMarks::move_passed_to(EventLog& log) {
  // In the order in which marks were made: a mark that the device has not passed ends the loop.
  while (!marks_.empty() && marks_.front().event.query()) {
    auto mark = std::move(marks_.front());
    marks_.pop_front();
    const auto time_ns = time_of(mark.event);
    const auto error_ns = anchor_error_ns_ + rounding_of(time_ns - anchor_ns_);
    worst_error_ns_ = std::max(worst_error_ns_, error_ns);
    log.add_at(time_ns, mark.kind, mark.step, mark.index);
    if (time_ns - anchor_ns_ > kFarthestNs) {
      std::swap(anchor_, mark.event);
      anchor_ns_ = time_ns;
      anchor_error_ns_ = error_ns;
    }
    spare_.push_back(std::move(mark.event));
  }
}

void DeviceMarks::collect(EventLog& log) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_capturing(device_)) {
    return;
  }
  move_passed_to(log);
  // After a pause the next mark is far from the anchor, so its rounding error is large. The device
  // is idle, so reading both clocks again costs no wait.
  const bool after_pause = marks_.empty() && now_() - anchor_ns_ > 2 * kFarthestNs;
  if (after_pause && current_stream(device_)->query()) {
    relate();
  }
}

void DeviceMarks::collect_all(EventLog& log) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_capturing(device_)) {
    return;
  }
  for (const auto& mark : marks_) {
    mark.event.synchronize();
  }
  move_passed_to(log);
  relate();
}

int64_t DeviceMarks::error_ns() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::max(worst_error_ns_, anchor_error_ns_);
}

}  // namespace ddpx
