// Manual finalization: late gradients, a second call, and calls that come too early.
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>

#include "replica.h"

namespace ddpx {
namespace {

TEST(ReducerManualMode, MissingGradientsAreReportedByFinalize) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.step();
  replica.reducer->finalize_backward();
  replica.clear_grads();
  replica.step({2, 1});
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }), {"'w0'", "find_unused_parameters"});
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_TRUE(replica.params[0].grad().defined()) << "all other gradients were averaged";
}

TEST(ReducerManualMode, ALateGradientInABucketViewIsReportedByBoth) {
  Replica replica(GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/true);
  replica.reducer->set_manual_finalization(true);
  replica.step();
  // No watched output shows that this is a backward.
  EXPECT_THROW((replica.params[0].sum() * 2).backward(), UserError);
  expect_mentions(
      error_of([&] { replica.reducer->finalize_backward(); }), {"'w0'", "gradient_as_bucket_view"});
}

TEST(ReducerManualMode, ALateGradientOutsideTheBucketIsNoChangeOfTheScript) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.step();
  EXPECT_THROW((replica.params[0].sum() * 2).backward(), UserError);
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerManualMode, ABackwardOfALocalForwardHasNothingToFinalize) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.reducer->set_sync_enabled(false);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer->set_sync_enabled(true);
  std::string error;
  replica.params[2].register_hook(
      [&](at::Tensor) { error = error_of([&] { replica.reducer->finalize_backward(); }); });
  loss.backward();
  expect_mentions(error, {"No synchronized backward has run since the last finalization"});
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

TEST(ReducerManualMode, APendingStepAllowsAutogradGrad) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  const auto loss = replica.forward({2, 1, 0});
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(torch::autograd::grad({loss}, {replica.params[0]})[0].item<double>(), 12.);
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerManualMode, TheLaunchOfTheLastBucketIsTooEarly) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.step();
  replica.reducer->finalize_backward();
  replica.reducer->prepare_forward();
  replica.clear_grads();
  replica.forget_calls();
  std::string error;
  replica.collective->on_launch = [&](std::size_t index) {
    if (index == 2) {
      error = error_of([&] { replica.reducer->finalize_backward(); });
    }
  };
  replica.step();
  expect_mentions(error, {"before all DDP buckets were ready"});
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerManualMode, WithoutPeersTheLastGradientCountsToo) {
  Replica replica;
  replica.reducer->set_collective(std::make_shared<FakeCollective>(0, 1));
  replica.reducer->set_manual_finalization(true);
  for (int step = 0; step < 2; ++step) {
    replica.clear_grads();
    std::string error;
    const auto key = replica.params[0].register_hook(
        [&](at::Tensor) { error = error_of([&] { replica.reducer->finalize_backward(); }); });
    replica.step({2, 1, 0});
    replica.params[0].remove_hook(key);
    expect_mentions(error, {"before all DDP buckets were ready", "'w0'"});
    replica.reducer->finalize_backward();
    EXPECT_EQ(replica.grads(), kLocalGrads);
  }
}

// A hook may run an optimizer.
TEST(ReducerManualMode, WithAHookParamsMayChangeBeforeFinalization) {
  class Identity final : public CommHook {
   public:
    c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.getBufferRef());
      return future;
    }
    at::Tensor parseHookResult(const c10::IValue& result) override {
      return result.toTensor();
    }
  };
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  set_comm_hook(*replica.reducer, std::make_shared<Identity>());
  replica.step();
  {
    const at::NoGradGuard no_grad;
    replica.params[0].mul_(2);
  }
  replica.reducer->finalize_backward();
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

// The error of a step that its own backward has finalized does not let a second step begin.
TEST(ReducerManualMode, AFailedFinalizationWithinABackwardIsTheOnlyOne) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.step();
  replica.reducer->finalize_backward();
  replica.reducer->prepare_forward();
  replica.clear_grads();
  replica.forget_calls();
  replica.collective->on_wait = [&](std::size_t index) {
    replica.collective->fail(index, "connection reset by peer");
  };
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  input.register_hook([&](at::Tensor) {
    expect_mentions(
        error_of([&] { replica.reducer->finalize_backward(); }), {"connection reset by peer"});
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kFinalized);
  });
  replica.forward({2, 1, 0}, input).backward();
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST(ReducerManualMode, ASecondFinalizationRaisesAtOnceWhileTheFirstWaits) {
  Replica replica;
  replica.reducer->set_manual_finalization(true);
  replica.step();
  std::future<std::string> call;
  replica.collective->on_wait = [&](std::size_t index) {
    if (!call.valid()) {
      call = std::async(std::launch::async, [&] {
        return error_of([&] { replica.reducer->finalize_backward(); });
      });
    }
    EXPECT_EQ(call.wait_for(std::chrono::seconds(5)), std::future_status::ready);
    replica.collective->complete(index);
  };
  replica.reducer->finalize_backward();
  expect_mentions(call.get(), {"was already called for this backward pass"});
}

// The script knows of the error, so that no backward is expected any more.
TEST(ReducerManualMode, MayBeRequiredAfterABackwardThatRaised) {
  Replica replica;
  const auto loss = replica.forward({2, 1, 0});
  const auto key = replica.params[2].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(loss.backward(), std::domain_error);  // before the first gradient
  replica.params[2].remove_hook(key);
  replica.reducer->set_manual_finalization(true);
  replica.reducer->set_manual_finalization(false);
  replica.collective->on_wait = [&](std::size_t index) {
    replica.collective->fail(index, "connection reset by peer");
  };
  replica.failing_step();
  replica.reducer->set_manual_finalization(true);
}

TEST(ReducerManualMode, AnUnusedBucketThatAPeerUsesIsReducedWithinBackward) {
  ReducerOptions options{kParamABucket, GraphMode::kFindUnused, false};
  options.skip_unused_buckets = true;
  Replica replica(options);
  replica.reducer->set_manual_finalization(true);
  const auto step = [&](const Indices& order) {
    replica.clear_grads();
    replica.forget_calls();
    replica.step(order);
    const auto num_calls = replica.collective->all_reduces().size();
    replica.reducer->finalize_backward();
    EXPECT_EQ(replica.collective->all_reduces().size(), num_calls);
    return num_calls;
  };
  const auto all = step({2, 1, 0});
  step({2, 1});
  EXPECT_EQ(step({2, 1}), all - 1) << "the bucket of w0 is skipped";
  EXPECT_EQ(step({2, 1, 0}), all) << "and reduced behind the map";
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
