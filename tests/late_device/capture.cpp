#include "capture.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "streams.h"

namespace late {
namespace {

struct Capture {
  std::unordered_set<Queue*> queues;  // empty: no capture
  std::thread::id thread;
  bool valid = true;
};

std::mutex mutex;
Capture capture;  // `mutex` guards it
thread_local int num_permits = 0;

void require(bool permitted, const char* error) {
  capture.valid = capture.valid && permitted;
  TORCH_CHECK(permitted, error);
}

}  // namespace

void begin_capture() {
  auto& origin = current_queue(current_device());
  TORCH_CHECK(origin.stream_id() != 0, "the default stream cannot be captured");
  const std::lock_guard<std::mutex> lock(mutex);
  capture = {{&origin}, std::this_thread::get_id()};
}

void end_capture() {
  Capture ended;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ended = std::exchange(capture, {});
  }
  for (auto* queue : ended.queues) {
    queue->wait(queue->last());
  }
  TORCH_CHECK(ended.valid, "an operation that is not permitted has made the capture invalid");
}

bool is_captured(Queue& queue) {
  const std::lock_guard<std::mutex> lock(mutex);
  return capture.queues.count(&queue) != 0;
}

void check_wait(Queue& waiting, Queue& awaited) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (capture.queues.count(&awaited) != 0) {
    require(waiting.stream_id() != 0, "the default stream would wait for a captured stream");
    capture.queues.insert(&waiting);
  } else {
    require(
        capture.queues.count(&waiting) == 0,
        "a captured stream would wait for a stream outside the capture");
  }
}

void check_host_wait(Queue& queue) {
  check_host_wait(is_captured(queue));
}

void check_host_wait(bool captured) {
  if (num_permits != 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const bool captures = !capture.queues.empty() && capture.thread == std::this_thread::get_id();
  require(!captures && !captured, "the host would wait for the device during a capture");
}

HostWaitsPermitted::HostWaitsPermitted() {
  ++num_permits;
}

HostWaitsPermitted::~HostWaitsPermitted() {
  --num_permits;
}

}  // namespace late
