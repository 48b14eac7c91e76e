#include "recording.h"

#include <c10/util/Exception.h>

#include <utility>

#include "../comm/end_notice.h"

namespace ddpx {
namespace {

// Null if the backend gives none; the end is then known by the wait for it.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const Bucket::Flight& flight) {
  if (!flight.work) {
    return flight.future;
  }
  try {
    return flight.work->getFuture();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

Recording::Recording(std::size_t capacity, c10::Device device, uint32_t max_steps)
    : log_(capacity), max_steps_(max_steps) {
  if (!device.is_cpu()) {
    marks_.emplace(device, log_.capacity());
  }
}

void Recording::note_plan(uint32_t step, const BucketPlan& plan) {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  if (plans_.empty()) {
    first_step_ = step;
  }
  plans_.push_back({step, plan});
}

void Recording::note(EventKind kind, uint32_t step, std::size_t index) {
  if (!marks_) {
    note_on_host(kind, step, index);
  } else if (wants(step)) {
    try {
      if (marks_->mark(kind, step, index)) {
        return;
      }
    } catch (const std::exception&) {
      // The training, which it may be called in the middle of, goes on.
    }
    give_up(step);
  }
}

void Recording::give_up(uint32_t step) {
  auto before = given_up_.load();
  while (before < step && !given_up_.compare_exchange_weak(before, step)) {
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
  const auto self = shared_from_this();
  if (auto* work = dynamic_cast<GivesEndNotice*>(flight.work.get())) {
    work->notify_at_end(
        [self, step, index] { self->note_on_host(EventKind::kCompleted, step, index); });
  } else if (const auto future = future_of(flight)) {
    future->addCallback([self, step, index](c10::ivalue::Future& ended) {
      // A future of a device's is done when its work is queued; the current stream then waits for
      // its tensors. Others are done when all is done.
      if (ended.devices().empty()) {
        self->note_on_host(EventKind::kCompleted, step, index);
      } else {
        self->note(EventKind::kCompleted, step, index);
      }
    });
  }
}

void Recording::collect() noexcept {
  if (!marks_) {
    return;
  }
  try {
    marks_->collect(log_);
  } catch (const std::exception&) {
    // What a device has against it, the training hears from its own calls; marks stay where they
    // are.
  }
}

void Recording::close() {
  if (marks_) {
    marks_->collect_all(log_);
  }
}

}  // namespace ddpx
