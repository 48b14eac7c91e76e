// Each observer learns from an event what concerns it.
#include "observe/step_observer.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "plans.h"

namespace ddpx {
namespace {

TEST(StepObserver, ARecordingGetsTheEventsOfItsSteps) {
  StepObserver observer;
  observer.emit(StepEvent::kForwardBegin, 0);
  const auto recording = std::make_shared<Recording>(64, c10::kCPU, 0);
  observer.add_recording(recording, 0, plan_of({1}));
  EXPECT_TRUE(observer.recorded());
  observer.emit(StepEvent::kGradArrived, 0, 5);
  observer.emit(StepEvent::kHookBegin, 0, 1);  // for peers alone
  observer.emit_phase(0, 2);
  observer.emit(StepEvent::kStepEnd, 0);
  observer.remove_recording(recording);
  observer.emit(StepEvent::kForwardBegin, 1);
  std::vector<EventKind> kinds;
  for (const auto& event : recording->log().read()) {
    kinds.push_back(event.kind);
  }
  EXPECT_EQ(
      kinds,
      (std::vector<EventKind>{EventKind::kGradArrived, EventKind::kPhase, EventKind::kStepEnd}));
}

TEST(StepObserver, TheClockMeasuresAStep) {
  StepObserver observer;
  for (const auto event :
       {StepEvent::kForwardBegin,
        StepEvent::kStepBegin,
        StepEvent::kLaunched,
        StepEvent::kBackwardEnd,
        StepEvent::kCommEnd,
        StepEvent::kStepEnd}) {
    observer.emit(event, 3);
  }
  const auto& report = observer.clock().report();
  EXPECT_EQ(report.step, 3);
  EXPECT_EQ(report.num_launches, 1);
  for (const auto moment : report.moments) {
    EXPECT_GT(moment, 0);
  }
}

}  // namespace
}  // namespace ddpx
