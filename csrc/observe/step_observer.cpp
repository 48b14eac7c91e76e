#include "step_observer.h"

#include <array>
#include <optional>
#include <utility>

namespace ddpx {
namespace {

using health::Doing;

// The form in which each observer gets an event.
struct Meaning {
  StepEvent event;
  std::optional<EventKind> recorded = std::nullopt;
  std::optional<Moment> moment = std::nullopt;
  std::optional<Doing> published = std::nullopt;
};

constexpr std::array kMeanings = {
    Meaning{
        StepEvent::kForwardBegin, EventKind::kForwardBegin, Moment::kForwardStart, Doing::kForward},
    Meaning{
        StepEvent::kModuleForwardBegin, EventKind::kForwardBegin, std::nullopt, Doing::kForward},
    Meaning{StepEvent::kForwardEnd, EventKind::kForwardEnd},
    Meaning{StepEvent::kRebuildBegin, std::nullopt, std::nullopt, Doing::kRebuilding},
    Meaning{StepEvent::kRebuildEnd, std::nullopt, std::nullopt, Doing::kForward},
    Meaning{StepEvent::kOutputReached, EventKind::kBackwardBegin},
    Meaning{StepEvent::kStepBegin, EventKind::kStepBegin, Moment::kBackwardStart, Doing::kBackward},
    Meaning{StepEvent::kGradArrived, EventKind::kGradArrived},
    Meaning{StepEvent::kBucketReady, EventKind::kBucketReady},
    Meaning{StepEvent::kLaunched, EventKind::kLaunched},
    Meaning{StepEvent::kHookBegin, std::nullopt, std::nullopt, Doing::kHook},
    Meaning{StepEvent::kHookEnd, std::nullopt, std::nullopt, Doing::kBackward},
    Meaning{StepEvent::kBackwardEnd, EventKind::kBackwardEnd, Moment::kBackwardEnd},
    Meaning{StepEvent::kUseAgreement, std::nullopt, std::nullopt, Doing::kSettling},
    Meaning{StepEvent::kWaitBegin, EventKind::kWaitBegin, std::nullopt, Doing::kWaiting},
    Meaning{StepEvent::kWaitEnd, EventKind::kWaitEnd},
    Meaning{StepEvent::kAgreeBegin, EventKind::kAgreeBegin, std::nullopt, Doing::kAgreeing},
    Meaning{StepEvent::kAgreeEnd, EventKind::kAgreeEnd},
    Meaning{StepEvent::kCommEnd, std::nullopt, Moment::kCommEnd},
    Meaning{StepEvent::kWrittenBack, EventKind::kWrittenBack},
    Meaning{StepEvent::kStepEnd, EventKind::kStepEnd},
    Meaning{StepEvent::kIdle, std::nullopt, std::nullopt, Doing::kOutside},
    Meaning{StepEvent::kLocalBackwardEnd, EventKind::kLocalBackwardEnd},
    Meaning{StepEvent::kReady, std::nullopt, std::nullopt, Doing::kPending},
};

constexpr bool in_order_of_enum() {
  for (std::size_t i = 0; i < kMeanings.size(); ++i) {
    if (kMeanings[i].event != static_cast<StepEvent>(i)) {
      return false;
    }
  }
  return static_cast<std::size_t>(StepEvent::kReady) + 1 == kMeanings.size();
}
static_assert(in_order_of_enum(), "emit() finds the meaning of an event by its number");

// Peers see the launches of one step at a time.
bool starts_a_step_for_peers(StepEvent event) {
  return event == StepEvent::kForwardBegin || event == StepEvent::kStepBegin ||
         event == StepEvent::kIdle;
}

}  // namespace

void StepObserver::emit(StepEvent event, uint32_t step, std::size_t index) {
  const auto& meaning = kMeanings[static_cast<std::size_t>(event)];
  if (event == StepEvent::kStepBegin) {
    clock_.begin_step();
  } else if (event == StepEvent::kLaunched) {
    clock_.record_launch(step);
  } else if (event == StepEvent::kStepEnd) {
    clock_.end_step(step);
  }
  if (event == StepEvent::kBackwardEnd) {
    device_.mark_computed();
  } else if (event == StepEvent::kCommEnd) {
    device_.mark_reduced(peers_.waiting_for_all());
  }
  if (meaning.moment) {
    clock_.record(*meaning.moment, step);
  }
  if (starts_a_step_for_peers(event)) {
    peers_.begin_step(step);
  }
  if (meaning.published) {
    peers_.publish(*meaning.published, index);
  }
  if (meaning.recorded) {
    for (const auto& recording : recordings_) {
      recording->record(*meaning.recorded, step, index);
    }
  }
}

void StepObserver::emit_phase(uint32_t step, std::size_t phase) {
  for (const auto& recording : recordings_) {
    recording->record_on_host(EventKind::kPhase, step, phase);
  }
}

void StepObserver::emit_plan(uint32_t step, const BucketPlan& plan) {
  for (const auto& recording : recordings_) {
    recording->record_plan(step, plan);
  }
}

void StepObserver::follow(
    const InFlightReduction& reduction, uint32_t step, std::size_t bucket_index) {
  for (const auto& recording : recordings_) {
    recording->follow(reduction, step, bucket_index);
  }
}

void StepObserver::collect() {
  for (const auto& recording : recordings_) {
    recording->collect();
  }
}

void StepObserver::add_recording(
    std::shared_ptr<Recording> recording, uint32_t step, const BucketPlan& plan) {
  recording->record_plan(step, plan);
  recordings_.push_back(std::move(recording));
}

void StepObserver::remove_recording(const std::shared_ptr<Recording>& recording) {
  std::erase(recordings_, recording);
}

}  // namespace ddpx
