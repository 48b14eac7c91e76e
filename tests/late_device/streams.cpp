#include "streams.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

namespace late {
namespace {

constexpr int kPoolSize = 4;

std::mutex lateness_mutex;
Lateness chosen;

// The streams of one device, by stream id; the first is the default stream.
struct Streams {
  std::mutex mutex;
  std::vector<std::unique_ptr<TaskQueue>> queues;
  std::vector<c10::StreamId> pool;
  std::size_t num_taken = 0;

  c10::StreamId add(c10::DeviceIndex device) {
    const auto id = queues.size();
    queues.push_back(
        std::make_unique<TaskQueue>(lateness().seed + 1000 * static_cast<uint64_t>(device) + id));
    return static_cast<c10::StreamId>(id);
  }
};

// Never destroyed: threads of the queues may outlive static objects.
Streams& streams_of(c10::DeviceIndex device) {
  static auto* all = new std::array<Streams, kNumDevices>();
  auto& streams = all->at(static_cast<std::size_t>(device));
  const std::lock_guard<std::mutex> lock(streams.mutex);
  if (streams.queues.empty()) {
    streams.add(device);
  }
  return streams;
}

thread_local std::array<c10::StreamId, kNumDevices> current_ids{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

}  // namespace

Lateness lateness() {
  const std::lock_guard<std::mutex> lock(lateness_mutex);
  return chosen;
}

void set_lateness(const Lateness& lateness) {
  const std::lock_guard<std::mutex> lock(lateness_mutex);
  chosen = lateness;
}

TaskQueue::TaskQueue(uint64_t seed) : random_(seed) {
  std::thread([this] { work(); }).detach();
}

uint64_t TaskQueue::submit(Kind kind, Task task) {
  const auto hold = kind == Kind::kSignal ? std::chrono::milliseconds(0) : lateness().hold;
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back({kind, std::move(task), Clock::now() + hold});
  changed_.notify_all();
  return ++num_submitted_;
}

void TaskQueue::demand(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, number);
  changed_.notify_all();
}

void TaskQueue::wait_for(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, number);
  changed_.notify_all();
  changed_.wait(lock, [&] { return num_run_ >= number; });
  if (const auto error = std::exchange(error_, nullptr)) {
    std::rethrow_exception(error);
  }
}

bool TaskQueue::has_run(uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_run_ >= number;
}

uint64_t TaskQueue::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_submitted_;
}

void TaskQueue::work() {
  const c10::NoGradGuard no_grad;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !entries_.empty(); });
    changed_.wait_until(lock, entries_.front().deadline, [this] { return demanded_ > num_run_; });
    auto entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      delay(entry.kind);
      entry.task();
    } catch (...) {
      error = std::current_exception();
    }
    entry.task = nullptr;  // what it refers to goes before anybody hears that it has run
    lock.lock();
    error_ = error_ ? error_ : error;
    ++num_run_;
    changed_.notify_all();
  }
}

void TaskQueue::delay(Kind kind) {
  const auto least = lateness().delay;
  if (kind == Kind::kKernel && least.count() > 0) {
    std::uniform_int_distribution<int64_t> draw(least.count(), 2 * least.count());
    std::this_thread::sleep_for(std::chrono::microseconds(draw(random_)));
  }
}

TaskQueue& queue_of(const c10::Stream& stream) {
  auto& streams = streams_of(stream.device_index());
  const std::lock_guard<std::mutex> lock(streams.mutex);
  return *streams.queues.at(static_cast<std::size_t>(stream.id()));
}

Point end_of(const c10::Stream& stream) {
  auto& queue = queue_of(stream);
  return {&queue, queue.last()};
}

void make_wait(const c10::Stream& stream, const Point& point) {
  auto& queue = queue_of(stream);
  if (point.queue != nullptr && point.queue != &queue) {
    queue.submit(TaskQueue::Kind::kWait, [point] { point.wait(); });
  }
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_ids.at(static_cast<std::size_t>(device)));
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto& id = current_ids.at(static_cast<std::size_t>(stream.device_index()));
  return stream_of(stream.device_index(), std::exchange(id, stream.id()));
}

c10::Stream new_stream(c10::DeviceIndex device) {
  auto& streams = streams_of(device);
  const std::lock_guard<std::mutex> lock(streams.mutex);
  return stream_of(device, streams.add(device));
}

c10::Stream stream_from_pool(c10::DeviceIndex device) {
  auto& streams = streams_of(device);
  const std::lock_guard<std::mutex> lock(streams.mutex);
  if (streams.pool.size() < kPoolSize) {
    streams.pool.push_back(streams.add(device));
  }
  return stream_of(device, streams.pool[streams.num_taken++ % streams.pool.size()]);
}

void synchronize(c10::DeviceIndex device) {
  auto& streams = streams_of(device);
  std::vector<TaskQueue*> queues;
  {
    const std::lock_guard<std::mutex> lock(streams.mutex);
    for (const auto& queue : streams.queues) {
      queues.push_back(queue.get());
    }
  }
  for (auto* queue : queues) {
    queue->wait_for(queue->last());
  }
}

}  // namespace late
