// Params that a backward does not reach, and buckets that are skipped.
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "replica.h"
#include "sent.h"

namespace ddpx {
namespace {

class UnreachedParams : public testing::TestWithParam<bool> {
 protected:
  static constexpr GraphMode kMode = GraphMode::kFindUnused;
  Replica replica{kMode, kParamABucket, /*gradient_as_bucket_view=*/GetParam()};
};

TEST_P(UnreachedParams, ABucketDoesNotWaitForAParamThatThisBackwardDoesNotReach) {
  replica.learn({2, 1, 0});
  const Sent sent(replica);
  replica.step({2, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "launch 0",
              "launch 1",
              "grad 0",
              "launch 2",
              "launch 3",
              "wait 0",
              "wait 1",
              "wait 2",
              "wait 3"}));
  EXPECT_TRUE(all_zero(sent.tensors[1]));
  EXPECT_EQ(replica.grads(), (Grads{10., std::nullopt, 5.}));
}

TEST_P(UnreachedParams, ABucketDoesNotWaitAfterALocalBackwardEither) {
  replica.learn({2, 1, 0});
  replica.reducer->set_sync_enabled(false);
  replica.step({2, 1, 0});
  replica.reducer->set_sync_enabled(true);
  replica.collective->clear();
  replica.step({2, 0});
  const auto& log = replica.collective->log;
  EXPECT_EQ(Log(log.begin(), log.begin() + 4), (Log{"grad 2", "launch 0", "launch 1", "grad 0"}));
}

TEST_P(UnreachedParams, UseMayVaryFromStepToStep) {
  replica.learn({2, 0});
  for (const bool used : {true, false, false, true}) {
    replica.clear_grads();
    const Sent sent(replica);
    replica.step(used ? Indices{2, 1, 0} : Indices{2, 0});
    EXPECT_EQ(sent.tensors.size(), 4u);
    EXPECT_EQ(replica.grads(), used ? kMeanGrads : (Grads{10., std::nullopt, 5.}));
  }
}

TEST_P(UnreachedParams, AParamThatOnlyPeersUsedGetsTheirMean) {
  replica.learn({2, 1, 0});
  replica.collective->peer_sends = [&](const at::Tensor& own, int) {
    return own.scalar_type() == at::kInt ? at::ones_like(own) : own + 4;
  };
  replica.step({2, 0});
  EXPECT_EQ(replica.grads(), (Grads{16., 12., 14.}));
  EXPECT_EQ(replica.reducer->used_by_ranks(), (std::vector<int32_t>{4, 3, 4}));
}

TEST_P(UnreachedParams, AKeptGradientIsAveragedWithWhatCameToIt) {
  const auto multiples = replica.collective->peer_sends;
  replica.step({2, 1, 0});
  // A view takes part in the all-reduce: it comes back as it was, because ranks kept the same mean.
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own; };
  for (int step = 0; step < 3; ++step) {
    replica.step({2, 0});
    EXPECT_EQ(replica.grads()[1], 20.);
  }
  replica.collective->peer_sends = multiples;
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.grads()[1], 70.) << "2.5 times the sum of 20 and 8";
}

TEST_P(UnreachedParams, ALocalGradientIsAveragedInANewGroup) {
  replica.learn({2, 1, 0});
  replica.reducer->set_sync_enabled(false);
  replica.step({2, 1, 0});
  replica.reducer->set_sync_enabled(true);
  replica.reducer->set_collective(replica.collective);
  replica.step({2, 0});
  EXPECT_EQ(replica.grads()[1], 20.);
}

TEST_P(UnreachedParams, ALocalGradientThatWasDroppedIsUnusedInANewGroup) {
  replica.learn({2, 1, 0});
  replica.reducer->set_sync_enabled(false);
  replica.step({2, 1, 0});
  replica.reducer->set_sync_enabled(true);
  replica.clear_grads();
  replica.reducer->set_collective(replica.collective);
  replica.step({2, 0});
  EXPECT_FALSE(replica.params[1].grad().defined());
}

TEST_P(UnreachedParams, ALossThatReachesNoParamLaunchesWhereBackwardStarts) {
  replica.learn();
  auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  const auto key = input.register_hook(
      [log = &replica.collective->log](at::Tensor) { log->push_back("input"); });
  replica.reducer->prepare_forward();
  const auto output = input * 2;
  replica.reducer->watch_outputs({output});
  output.backward();
  input.remove_hook(key);
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"launch 0",
              "launch 1",
              "launch 2",
              "input",
              "launch 3",
              "wait 0",
              "wait 1",
              "wait 2",
              "wait 3"}));
  EXPECT_EQ(replica.grads(), (Grads{std::nullopt, std::nullopt, std::nullopt}));
}

TEST_P(UnreachedParams, ABackwardForInputsThatReachesNoParamMakesNoStep) {
  replica.learn();
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  replica.reducer->prepare_forward();
  const auto output = input * 2;
  replica.reducer->watch_outputs({output});
  torch::autograd::backward({output}, {}, std::nullopt, false, {input});
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

// Autograd does not list the root among the nodes that the backward reaches.
TEST_P(UnreachedParams, AParamMayBeTheRootOfTheBackward) {
  replica.learn();
  replica.params[2].backward(at::ones_like(replica.params[2]));
  EXPECT_EQ(replica.grads(), (Grads{std::nullopt, std::nullopt, 2.5}));
  replica.clear_grads();
  replica.forget_calls();
  replica.step({1, 0});
  const auto& log = replica.collective->log;
  EXPECT_EQ(Log(log.begin(), log.begin() + 4), (Log{"grad 1", "launch 0", "launch 1", "grad 0"}))
      << "the root did not come from a nested backward";
}

TEST_P(UnreachedParams, AGradientFromANestedBackwardIsAnError) {
  replica.learn({2, 0});
  // Runs while the outer graph task does, which does not lead to param 1.
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    const c10::AutoGradMode record_graph(true);
    replica.params[1].sum().backward();
  });
  const auto text = replica.failing_step({2, 0});
  expect_mentions(text, {"'w1'", "use_reentrant=False"});
  replica.clear_grads();
  replica.step({2, 0});
  EXPECT_TRUE(replica.grads()[1].has_value()) << "such params are waited for from then on";
  replica.params[0].remove_hook(key);
}

// Where nested tasks reach params of the wrapper, only those params are waited for.
TEST_P(UnreachedParams, ABucketDoesNotWaitForAParamThatNoNestedBackwardReached) {
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    const c10::AutoGradMode record_graph(true);
    replica.params[1].sum().backward();
  });
  replica.learn({2, 0});
  replica.params[0].remove_hook(key);
  const auto& log = replica.collective->log;
  replica.step({1, 0});
  EXPECT_EQ(Log(log.begin(), log.begin() + 4), (Log{"grad 1", "launch 0", "launch 1", "grad 0"}));
  replica.collective->clear();
  replica.step({2, 0});
  EXPECT_EQ(Log(log.begin(), log.begin() + 4), (Log{"grad 2", "launch 0", "grad 0", "launch 1"}));
}

TEST_P(UnreachedParams, PeersLearnWhichParamsANestedBackwardReaches) {
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    const c10::AutoGradMode record_graph(true);
    replica.params[1].sum().backward();
  });
  replica.learn({2, 0});
  replica.params[0].remove_hook(key);
  const Sent sent(replica);
  replica.step({2, 0});
  const auto* map = sent.tensors.back().const_data_ptr<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(map, map + 3), (std::vector<int32_t>{1, 1 << 16, 1}));
}

TEST_P(UnreachedParams, OnlyPeersMayKnowThatANestedBackwardReachesAParam) {
  const int32_t in_a_nested_task = 1 << 16;
  replica.collective->peer_sends = [&](const at::Tensor& own, int) {
    return own.scalar_type() == at::kInt ? own * (1 + in_a_nested_task) : own;
  };
  replica.step({2, 0});
  EXPECT_EQ(replica.reducer->used_by_ranks(), (std::vector<int32_t>{4, 0, 4}));
  replica.collective->clear();
  replica.step({1, 0});
  const auto& log = replica.collective->log;
  EXPECT_EQ(Log(log.begin(), log.begin() + 2), (Log{"grad 1", "grad 0"})) << "w2 is waited for";
}

TEST_P(UnreachedParams, AStepThatBrokeOffLeavesNoTrace) {
  replica.learn({2, 0});
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step({2, 0}), std::domain_error);
  replica.params[0].remove_hook(key);
  replica.clear_grads();
  replica.collective->clear();
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.collective->all_reduces().size(), 4u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(UnreachedParams, UnusedBucketsCanBeLeftOut) {
  ReducerOptions options{kParamABucket, kMode, /*gradient_as_bucket_view=*/GetParam()};
  options.skip_unused_buckets = true;
  Replica skipping(options);
  skipping.learn({2, 0});
  {
    const Sent sent(skipping);
    skipping.step({2, 0});
    EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 1, 3}));
    EXPECT_EQ(skipping.grads(), (Grads{10., std::nullopt, 5.}));
  }
  skipping.clear_grads();
  {
    const Sent sent(skipping);
    skipping.step({2, 1, 0});
    EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 1, 3, 2}));
    EXPECT_EQ(skipping.grads(), kMeanGrads);
  }
  skipping.clear_grads();
  const Sent sent(skipping);
  skipping.step({2, 1, 0});
  EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 2, 1, 3}));
  EXPECT_EQ(skipping.grads(), kMeanGrads);
}

TEST_P(UnreachedParams, ABucketWhoseUseVariesIsNotLeftOut) {
  ReducerOptions options{kParamABucket, kMode, /*gradient_as_bucket_view=*/GetParam()};
  options.skip_unused_buckets = true;
  Replica skipping(options);
  const auto sends_in_plan_order = [&](const std::vector<std::size_t>& used) {
    skipping.clear_grads();
    const Sent sent(skipping);
    skipping.step(used);
    return sent.sizes() == std::vector<int64_t>{3, 2, 1, 3};
  };
  skipping.learn({2, 0});
  EXPECT_FALSE(sends_in_plan_order({2, 1, 0}));  // a wrong prediction: from now on after 2 steps
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(sends_in_plan_order({2, 0}));
    EXPECT_TRUE(sends_in_plan_order({2, 1, 0}));
    EXPECT_EQ(skipping.grads(), kMeanGrads);
  }
  EXPECT_TRUE(sends_in_plan_order({2, 0}));
  EXPECT_TRUE(sends_in_plan_order({2, 0}));
  EXPECT_FALSE(sends_in_plan_order({2, 0}));
  EXPECT_EQ(skipping.grads(), (Grads{10., std::nullopt, 5.}));
}

TEST_P(UnreachedParams, AGradientThatIsClearedCountsWhereItsBucketWasSkippedByMistake) {
  for (const bool batched : {false, true}) {
    ReducerOptions options{kParamABucket, kMode, /*gradient_as_bucket_view=*/GetParam()};
    options.skip_unused_buckets = true;
    options.batched_copy = batched;
    Replica skipping(options);
    skipping.learn({2, 0});
    skipping.step({2, 0});
    skipping.clear_grads();
    const auto key = skipping.params[0].register_hook(
        [&](at::Tensor) { skipping.params[1].mutable_grad().reset(); });
    skipping.step({2, 1, 0});
    skipping.params[0].remove_hook(key);
    EXPECT_EQ(skipping.grads(), kMeanGrads);
  }
}

INSTANTIATE_TEST_SUITE_P(Views, UnreachedParams, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

}  // namespace
}  // namespace ddpx
