#include "observe/recording.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

std::shared_ptr<Recording> recording(std::size_t capacity = 1000, uint32_t max_steps = 0) {
  return std::make_shared<Recording>(capacity, c10::Device(c10::kCPU), max_steps);
}

std::string text_of(const Event& event) {
  const auto index = std::to_string(event.index);
  switch (event.kind) {
    case EventKind::kForwardBegin:
      return "forward";
    case EventKind::kForwardEnd:
      return "forward end";
    case EventKind::kPhase:
      return to_string(static_cast<Phase>(event.index));
    case EventKind::kBackwardBegin:
      return "backward";
    case EventKind::kGradArrived:
      return "grad " + index;
    case EventKind::kBucketReady:
      return "ready " + index;
    case EventKind::kLaunched:
      return "launched " + index;
    case EventKind::kCompleted:
      return "completed " + index;
    case EventKind::kBackwardEnd:
      return "backward end";
    case EventKind::kWaitBegin:
      return "wait " + index;
    case EventKind::kWaitEnd:
      return "waited " + index;
    case EventKind::kWrittenBack:
      return "written " + index;
    case EventKind::kStepBegin:
      return "begin";
    case EventKind::kAgreeBegin:
      return "agree";
    case EventKind::kAgreeEnd:
      return "agreed";
    case EventKind::kStepEnd:
      return "end";
    case EventKind::kLocalBackwardEnd:
      return "local end";
  }
  return "?";
}

Log texts_of(const Recording& recording) {
  Log texts;
  for (const auto& event : recording.log().read()) {
    texts.push_back(text_of(event));
  }
  return texts;
}

TEST(Recording, HasAStepInOrder) {
  Replica replica;
  replica.learn();
  const auto recorded = recording();
  add_recording(*replica.reducer, recorded);
  replica.step();
  const Log forward = {"forward", "forward end"};
  const Log backward = {
      "backward",
      to_string(Phase::kCollecting),
      "begin",
      "grad 2",
      "ready 0",
      "launched 0",
      "grad 1",
      "ready 1",
      "launched 1",
      "grad 0",
      "ready 2",
      "launched 2",
      "backward end"};
  const Log end = {
      to_string(Phase::kFinalizing),
      "wait 0",
      "waited 0",
      "written 0",
      "wait 1",
      "waited 1",
      "written 1",
      "wait 2",
      "waited 2",
      "written 2",
      to_string(Phase::kIdle),
      "end"};
  Log expected;
  for (const auto& part : {forward, backward, end}) {
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(texts_of(*recorded), expected);
}

TEST(Recording, EndsWhenItIsRemoved) {
  Replica replica;
  const auto recorded = recording();
  add_recording(*replica.reducer, recorded);
  replica.step();
  const auto number = recorded->log().num_added();
  EXPECT_GT(number, 0u);
  remove_recording(*replica.reducer, recorded);
  replica.step();
  EXPECT_EQ(recorded->log().num_added(), number);
}

TEST(Recording, TakesAsManyStepsAsAreWanted) {
  for (const uint32_t first : {0U, 1U}) {  // the buckets are rebuilt after step 0
    Replica replica;
    for (uint32_t step = 0; step < first; ++step) {
      replica.step();
    }
    const auto recorded = recording(1000, 2);
    add_recording(*replica.reducer, recorded);
    for (int i = 0; i < 4; ++i) {
      replica.step();
    }
    std::vector<uint32_t> ends;
    for (const auto& event : recorded->log().read()) {
      if (event.kind == EventKind::kStepEnd) {
        ends.push_back(event.step);
      }
    }
    EXPECT_EQ(ends, (std::vector<uint32_t>{first, first + 1}));
  }
}

TEST(Recording, KnowsThePlanOfEachStep) {
  Replica replica(GraphMode::kDefault, kParamABucket);
  const auto recorded = recording();
  add_recording(*replica.reducer, recorded);
  replica.step({0, 1, 2});
  replica.step({0, 1, 2});
  ASSERT_EQ(recorded->plans().size(), 2u);
  EXPECT_EQ(recorded->plans()[0].first_step, 0u);
  EXPECT_EQ(recorded->plans()[1].first_step, 1u);
  EXPECT_EQ(recorded->plans()[1].plan.buckets().front().param_indices, (Indices{0}));
}

TEST(Recording, PlansMayBeReadWhileTheReducerAddsOne) {
  const Replica replica;
  const auto recorded = recording();
  const auto plan = replica.reducer->state().plan();
  constexpr uint32_t kNumPlans = 2000;
  std::thread adder([&] {
    for (uint32_t step = 0; step < kNumPlans; ++step) {
      recorded->record_plan(step, plan);
    }
  });
  std::size_t num_read = 0;
  while (num_read < kNumPlans) {
    const auto plans = recorded->plans();
    EXPECT_GE(plans.size(), num_read);
    num_read = plans.size();
    if (!plans.empty()) {
      EXPECT_EQ(plans.back().first_step, num_read - 1);
    }
  }
  adder.join();
}

TEST(Recording, SeveralAtATime) {
  Replica replica;
  const auto first = recording();
  const auto second = recording();
  add_recording(*replica.reducer, first);
  replica.step();
  add_recording(*replica.reducer, second);
  replica.step();
  EXPECT_GT(first->log().num_added(), second->log().num_added());
  EXPECT_GT(second->log().num_added(), 0u);
}

TEST(Recording, HasTheEndOfABackwardThatIsNotSynchronised) {
  Replica replica;
  replica.learn();
  const auto recorded = recording();
  add_recording(*replica.reducer, recorded);
  replica.reducer->set_sync_enabled(false);
  replica.step();
  EXPECT_EQ(texts_of(*recorded), (Log{"forward", "forward end", "backward", "local end"}));
  replica.reducer->set_sync_enabled(true);
  replica.step();
  const auto texts = texts_of(*recorded);
  EXPECT_EQ(std::count(texts.begin(), texts.end(), "local end"), 1);
  EXPECT_EQ(texts.back(), "end");
}

TEST(Recording, CannotBeginInAStep) {
  Replica replica;
  const auto loss = replica.forward({2, 1, 0});
  std::string text;
  replica.params[0].register_hook([&](at::Tensor) {
    try {
      add_recording(*replica.reducer, recording());
    } catch (const UserError& error) {
      text = error.what();
    }
  });
  loss.backward();
  EXPECT_NE(text.find("ddpx.record()"), std::string::npos) << text;
}

TEST(Recording, ThePlanForAnotherGroupHoldsFromItsNumberOfSteps) {
  Replica replica;
  replica.learn();
  const auto recording = std::make_shared<Recording>(64, c10::kCPU, 0);
  add_recording(*replica.reducer, recording);
  replica.reducer->set_collective(replica.collective, 7);
  EXPECT_EQ(recording->plans().back().first_step, 7u);
}

}  // namespace
}  // namespace ddpx
