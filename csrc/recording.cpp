#include "recording.h"

#include <c10/util/Exception.h>

#include <utility>

#include "end_notice.h"

namespace ddpx {
namespace {

// Null if the backend gives none; the end is then known by the wait for it.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const Bucket::Flight& flight) {
  if (!flight.work) {
    return flight.future;
  }
  try {
    return flight.work->getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace

Recording::Recording(std::size_t capacity, c10::Device device, uint32_t max_steps)
    : log_(capacity), max_steps_(max_steps) {
  if (!device.is_cpu()) {
    marks_.emplace(device);
  }
}

void Recording::note_plan(uint32_t step, const BucketPlan& plan) {
  plans_.push_back({step, plan});
}

void Recording::note(EventKind kind, uint32_t step, std::size_t index) {
  if (!marks_) {
    note_on_host(kind, step, index);
  } else if (wants(step)) {
    marks_->mark(kind, step, index);
  }
}

void Recording::note_on_host(EventKind kind, uint32_t step, std::size_t index) {
  if (wants(step)) {
    log_.add(kind, step, index);
  }
}

void Recording::follow(const Bucket::Flight& flight, uint32_t step, std::size_t index) {
  if (!wants(step)) {
    return;
  }
  auto note_end = [self = shared_from_this(), step, index] {
    self->note(EventKind::kCompleted, step, index);
  };
  if (auto* work = dynamic_cast<GivesEndNotice*>(flight.work.get())) {
    work->notify_at_end(std::move(note_end));
  } else if (const auto future = future_of(flight)) {
    // On a device it is called with a current stream that waits for the future's tensors.
    future->addCallback([note_end = std::move(note_end)](c10::ivalue::Future&) { note_end(); });
  }
}

void Recording::collect() {
  if (marks_) {
    marks_->collect(log_);
  }
}

void Recording::close() {
  if (marks_) {
    marks_->collect_all(log_);
  }
}

}  // namespace ddpx
