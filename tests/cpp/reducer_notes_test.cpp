// What peers see of a step, on this rank's status page.
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "../health/local_ranks.h"
#include "errors.h"
#include "replica.h"

namespace ddpx {
namespace {

using health::Doing;

class ReducerNotes : public testing::TestWithParam<GraphMode> {};

TEST_P(ReducerNotes, EachWaitForPeersIsNotedAsOne) {
  const auto watch = health::watch(
      health::group_of(0, Replica::kWorldSize),
      health::access_to(std::make_shared<health::FakeStore>()));
  Replica replica(ReducerOptions{kParamABucket, GetParam(), false}, 0, watch);
  set_check_finite(*replica.reducer, true);
  int num_waits = 0;
  const auto check = [&](const std::string& what) {
    const auto doing = watch->page().view().activity().doing;
    EXPECT_TRUE(health::waits_for_peers(doing)) << what << ": " << to_string(doing);
    ++num_waits;
  };
  replica.collective->on_wait = [&](std::size_t index) {
    check("all-reduce " + std::to_string(index));
    replica.collective->complete(index);
  };
  replica.collective->on_broadcast = [&](const at::Tensor&) { check("broadcast"); };
  const bool may_leave_out = GetParam() == GraphMode::kFindUnused;
  for (int step = 0; step < 7; ++step) {
    // From step 3 on no rank reads which params were used, and each step waits for the all-reduce
    // that the step before it has launched.
    replica.step(may_leave_out && step < 3 ? Indices{2, 0} : Indices{2, 1, 0});
    EXPECT_EQ(watch->page().view().activity().doing, Doing::kOutside);
  }
  EXPECT_GT(num_waits, 7 * 3);
}

// One rank of a group that publishes its steps.
class ReducerPublishes : public testing::Test {
 protected:
  const health::StatusPage& page() const {
    return watch->page().view();
  }

  // The calls of a step of the wrapper that has published last.
  health::StepCalls calls_of(uint32_t step) const {
    return page().calls.find(page().activity().model, step).value_or(health::StepCalls());
  }

  std::shared_ptr<health::Monitor> watch = health::watch(
      health::group_of(0, Replica::kWorldSize),
      health::access_to(std::make_shared<health::FakeStore>()));
};

TEST_F(ReducerPublishes, ANumberIsPublishedAtOnce) {
  Replica replica(ReducerOptions{kParamABucket, GraphMode::kDefault, false}, 0, watch);
  number_as_constructed(*replica.reducer);
  EXPECT_NE(page().activity().model, health::model_of(health::kUnnumbered));
}

// Peers wait for no call of a local backward.
TEST_F(ReducerPublishes, AnAbortOfALocalBackwardIsNoFaultOfAStep) {
  ReducerOptions options{kParamABucket, GraphMode::kDefault, false};
  options.average = Average::kWeights;  // also local backwards are watched
  Replica replica(options, 0, watch);
  replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  for (const bool averages : {false, true}) {
    replica.reducer->set_sync_enabled(averages);
    replica.reducer->set_weight(1);
    EXPECT_THROW(replica.step(), std::domain_error);
    EXPECT_EQ(page().fault, averages ? health::Fault::kOfStep : health::Fault::kNone);
    replica.clear_grads();
  }
}

TEST_F(ReducerPublishes, AStepThatBrokeOffInAWaitWaitsNoMore) {
  Replica replica(ReducerOptions{kParamABucket, GraphMode::kDefault, false}, 0, watch);
  replica.collective->on_wait = [](std::size_t) { throw InternalError("on purpose"); };
  EXPECT_THROW(replica.step(), InternalError);
  EXPECT_EQ(page().activity().doing, Doing::kOutside);
}

TEST_F(ReducerPublishes, TheResultsOfAStepWithAnErrorAreNotCompared) {
  Replica replica(ReducerOptions{kParamABucket, GraphMode::kDefault, false}, 0, watch);
  replica.step();
  EXPECT_TRUE(calls_of(0).has_results());
  set_check_finite(*replica.reducer, true);
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return at::zeros_like(own); };
  replica.params[1].register_hook([](const at::Tensor& grad) { return grad / 0; });
  replica.failing_step();
  EXPECT_EQ(calls_of(1).results, health::StepCalls::kSpoiled);
}

// The host of this rank may have been declared lost.
TEST(ReducerLease, OtherThreadsMayLookWhileAForwardWaitsForTheLease) {
  health::Ranks ranks("AB", /*lease_ns=*/1'500'000'000);
  Replica replica(
      ReducerOptions{kParamABucket, GraphMode::kDefault, false}, /*rank=*/1, ranks.shared(1));
  ranks.store->hang();
  std::this_thread::sleep_for(std::chrono::milliseconds(1700));
  std::atomic<bool> begun{false};
  auto forward = std::async(std::launch::async, [&] {
    replica.reducer->prepare_forward();
    begun = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  auto look = std::async(std::launch::async, [&] { return replica.reducer->state().phase(); });
  EXPECT_EQ(look.wait_for(std::chrono::milliseconds(500)), std::future_status::ready);
  EXPECT_FALSE(begun);
  ranks.store->answer();
  forward.get();
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerNotes,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

}  // namespace
}  // namespace ddpx
