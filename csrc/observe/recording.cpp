#include "recording.h"

#include <c10/util/Exception.h>

#include "../comm/end_notice.h"

namespace ddpx {
namespace {

// Null if the backend gives no future. The end of the reduction is then the end of the wait.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const InFlightReduction& reduction) {
  if (reduction.future) {
    return reduction.future;
  }
  try {
    return reduction.work->getFuture();
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

void Recording::record_plan(uint32_t step, const BucketPlan& plan) {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  if (plans_.empty()) {
    first_step_ = step;
  }
  plans_.push_back({step, plan});
}

void Recording::record(EventKind kind, uint32_t step, std::size_t index) {
  if (!marks_) {
    record_on_host(kind, step, index);
  } else if (wants(step)) {
    mark(step, [&] { return marks_->mark(kind, step, index); });
  }
}

void Recording::mark(uint32_t step, const std::function<bool()>& add) {
  try {
    if (add()) {
      return;
    }
  } catch (const std::exception&) {
    // A failed mark must not stop the training.
  }
  give_up(step);
}

void Recording::give_up(uint32_t step) {
  auto before = given_up_.load();
  while (before < step && !given_up_.compare_exchange_weak(before, step)) {
  }
}

void Recording::record_on_host(EventKind kind, uint32_t step, std::size_t index) {
  if (wants(step)) {
    log_.add(kind, step, index);
  }
}

void Recording::follow(const InFlightReduction& reduction, uint32_t step, std::size_t index) {
  if (!wants(step)) {
    return;
  }
  const auto self = shared_from_this();
  if (auto* work = dynamic_cast<GivesEndNotice*>(reduction.work.get())) {
    work->notify_at_end(
        [self, step, index] { self->record_on_host(EventKind::kCompleted, step, index); });
  } else if (const auto future = future_of(reduction)) {
    // A device future completes when its work is queued, which is usually at the launch.
    if (marks_ && !future->devices().empty() && future->completed()) {
      mark(step, [&] { return marks_->mark_end(*future, EventKind::kCompleted, step, index); });
      return;
    }
    future->addCallback([self, step, index](c10::ivalue::Future& ended) {
      // The current stream waits for the work of a device future. A CPU future completes when the
      // work is done.
      if (ended.devices().empty()) {
        self->record_on_host(EventKind::kCompleted, step, index);
      } else {
        self->record(EventKind::kCompleted, step, index);
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
    // The training's own device calls report device errors. The next collect() reads these marks.
  }
}

void Recording::close() {
  if (marks_) {
    marks_->collect_all(log_);
  }
}

}  // namespace ddpx
