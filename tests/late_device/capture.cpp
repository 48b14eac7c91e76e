#include "capture.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_set>

#include "streams.h"

namespace late {
namespace {

std::mutex mutex;
std::unordered_set<const Queue*> captured;  // `mutex` guards it

}  // namespace

void begin_capture() {
  const auto* origin = &current_queue(current_device());
  const std::lock_guard<std::mutex> lock(mutex);
  captured = {origin};
}

void end_capture() {
  const std::lock_guard<std::mutex> lock(mutex);
  captured.clear();
}

bool is_captured(const Queue& queue) {
  const std::lock_guard<std::mutex> lock(mutex);
  return captured.count(&queue) != 0;
}

void check_wait(const Queue& waiting, const Queue& awaited) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (captured.count(&awaited) != 0) {
    captured.insert(&waiting);
  } else {
    TORCH_CHECK(
        captured.count(&waiting) == 0,
        "a captured stream would wait for a stream outside the capture");
  }
}

}  // namespace late
