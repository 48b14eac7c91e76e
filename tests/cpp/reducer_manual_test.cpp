// Manual finalization: the end of backward launches everything, and finalize_backward() ends the
// step.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>

#include "replica.h"

namespace ddpx {
namespace {

class ReducerManual : public testing::TestWithParam<GraphMode> {
 protected:
  ReducerManual() : replica(GetParam()) {
    replica.reducer->set_manual_finalization(true);
  }

  // The step that learns, and the rebuild that follows.
  void learn() {
    replica.step();
    replica.reducer->finalize_backward();
    if (GetParam() == GraphMode::kStatic) {
      replica.step();
      replica.reducer->finalize_backward();
    }
    replica.reducer->prepare_forward();
    replica.clear_grads();
    replica.forget_calls();
  }

  Replica replica;
};

TEST_P(ReducerManual, BackwardLaunchesEverythingAndWaitsForNothing) {
  for (int step = 0; step < 3; ++step) {
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kReady);
    const auto num_launches = replica.collective->all_reduces().size();
    const bool with_map =
        GetParam() == GraphMode::kFindUnused || (GetParam() == GraphMode::kStatic && step == 0);
    EXPECT_GE(num_launches, with_map ? 4u : 1u);
    EXPECT_EQ(replica.grads(), kLocalGrads);
    replica.reducer->finalize_backward();
    EXPECT_EQ(replica.collective->all_reduces().size(), num_launches) << "a call after backward";
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    EXPECT_EQ(replica.grads(), kMeanGrads);
    EXPECT_EQ(replica.reducer->state().num_steps(), step + 1);
    replica.reducer->prepare_forward();
    replica.forget_calls();
  }
}

TEST_P(ReducerManual, ShouldFinalizeAfterBackwardUntilTheRebuild) {
  EXPECT_TRUE(replica.reducer->state().should_finalize_after_backward());
  learn();
  EXPECT_FALSE(replica.reducer->state().should_finalize_after_backward());
  replica.reducer->set_manual_finalization(false);
  EXPECT_FALSE(replica.reducer->state().should_finalize_after_backward());
}

TEST_P(ReducerManual, AHookMayFinalizeBehindTheLastGradient) {
  learn();
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  std::size_t num_calls = 0;
  set_after_sync(*replica.reducer, [&] { ++num_calls; });
  input.register_hook([&](at::Tensor) {
    replica.reducer->finalize_backward();
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kFinalized);
    EXPECT_EQ(replica.grads(), kMeanGrads);
    expect_mentions(
        error_of([&] { replica.reducer->finalize_backward(); }), {"was already called", "rank 0"});
  });
  for (int step = 0; step < 2; ++step) {
    replica.clear_grads();
    replica.forget_calls();
    replica.forward({2, 1, 0}, input).backward();
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    EXPECT_EQ(replica.grads(), kMeanGrads);
    EXPECT_EQ(num_calls, static_cast<std::size_t>(step) + 1);
  }
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }),
      {"no gradient reduction requires finalization"});
}

TEST_P(ReducerManual, BeforeTheLastGradientNothingHappens) {
  learn();
  std::string error;
  const auto key = replica.params[2].register_hook(
      [&](at::Tensor) { error = error_of([&] { replica.reducer->finalize_backward(); }); });
  replica.step({2, 1, 0});
  expect_mentions(error, {"before all DDP buckets were ready", "'w0'", "phase backward", "step "});
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kReady);
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.params[2].remove_hook(key);
}

TEST_P(ReducerManual, AHookInTheFirstStepIsToldToWaitForTheEnd) {
  std::string error;
  replica.params[2].register_hook(
      [&](at::Tensor) { error = error_of([&] { replica.reducer->finalize_backward(); }); });
  replica.step({2, 1, 0});
  expect_mentions(error, {"before all DDP buckets were ready", "should_finalize_after"});
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerManual, APendingStepRefusesOtherStepsByName) {
  learn();
  const auto other = replica.forward({2, 1, 0});
  replica.step();
  const auto expect_pending = [&](const std::function<void()>& call) {
    expect_mentions(error_of(call), {"finalize_backward()", "rank 0", "reset()"});
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kReady);
  };
  expect_pending([&] { replica.reducer->prepare_forward(); });
  expect_pending([&] { replica.reducer->rebuild_buckets(); });
  expect_pending([&] { replica.reducer->prepare_for_backward(); });
  expect_pending([&] { set_check_finite(*replica.reducer, true); });
  expect_pending([&] { replica.reducer->set_manual_finalization(false); });
  expect_pending([&] { replica.reducer->remove_hooks(); });
  expect_pending([&] { replica.reducer->shadow_step(); });
  expect_pending([&] { replica.reducer->set_collective(replica.collective); });
  expect_pending([&] { other.backward({}, /*retain_graph=*/true); });
  replica.reducer->set_sync_enabled(false);
  expect_pending([&] { other.backward(); });
  replica.reducer->set_sync_enabled(true);
  EXPECT_EQ(replica.grads(), kLocalGrads);
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerManual, TheModeChangesOnlyBetweenSteps) {
  learn();
  const auto loss = replica.forward({2, 1, 0});
  expect_mentions(
      error_of([&] { replica.reducer->set_manual_finalization(false); }),
      {"require_manual_backward_finalization", "after forward", "reset()"});
  loss.backward();
  replica.reducer->finalize_backward();
  replica.reducer->set_manual_finalization(false);
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }),
      {"Set require_manual_backward_finalization to true first"});
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.forward({2, 1, 0});
  replica.reducer->reset();
  replica.reducer->set_manual_finalization(true);
}

TEST_P(ReducerManual, AResetDropsThePendingStep) {
  learn();
  const auto before = replica.reducer->state().num_steps();
  replica.step();
  replica.reducer->reset();
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_EQ(replica.reducer->state().num_steps(), before + 1) << "peers finish the step";
  replica.forget_calls();
  replica.clear_grads();
  replica.step();
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerManual, AnAbortedBackwardIsNotPending) {
  learn();
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step({2, 1, 0}), std::domain_error);
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }),
      {"no gradient reduction requires finalization"});
  replica.forget_calls();
  replica.clear_grads();
  replica.step();
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerManual, AFailedWaitEndsTheStep) {
  learn();
  const auto succeed = replica.collective->on_wait;
  replica.step();
  replica.collective->on_wait = [&](std::size_t index) {
    replica.collective->fail(index, "connection reset by peer");
  };
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }), {"connection reset by peer"});
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.collective->on_wait = succeed;
  replica.forget_calls();
  replica.clear_grads();
  replica.step();
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerManual,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

}  // namespace
}  // namespace ddpx
