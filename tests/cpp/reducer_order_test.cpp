// When collectives leave, in which order, and in which order they may complete.
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

std::vector<int64_t> sizes_sent(const Replica& replica) {
  std::vector<int64_t> sizes;
  for (const auto& all_reduce : replica.collective->all_reduces()) {
    sizes.push_back(all_reduce.tensor.numel());
  }
  return sizes;
}

TEST(ReducerOrder, ABucketLeavesWhileGradientsStillArrive) {
  Replica replica;
  replica.step({2, 1, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "launch 0",
              "grad 1",
              "launch 1",
              "grad 0",
              "launch 2",
              "wait 0",
              "wait 1",
              "wait 2"}));
}

TEST(ReducerOrder, AReadyBucketIsHeldBackForThoseBeforeItInThePlan) {
  Replica replica;
  replica.step({1, 2, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 1",
              "grad 2",
              "launch 0",
              "launch 1",
              "grad 0",
              "launch 2",
              "wait 0",
              "wait 1",
              "wait 2"}));
}

TEST(ReducerOrder, PlanOrderAndRightMeansForEveryArrivalOrder) {
  Indices arrival_order = {0, 1, 2};
  do {
    Replica replica;
    replica.step(arrival_order);
    EXPECT_EQ(sizes_sent(replica), (std::vector<int64_t>{3, 2, 1}));
    EXPECT_EQ(replica.grads(), kMeanGrads);
  } while (std::next_permutation(arrival_order.begin(), arrival_order.end()));
}

TEST(ReducerOrder, CollectivesMayCompleteInAnyOrder) {
  Indices completion_order = {0, 1, 2};
  do {
    Replica replica;
    replica.collective->on_wait = [&](std::size_t) {
      for (const auto index : completion_order) {
        replica.collective->complete(index);
      }
    };
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  } while (std::next_permutation(completion_order.begin(), completion_order.end()));
}

TEST(ReducerOrder, ACollectiveMayCompleteBeforeItIsWaitedFor) {
  Replica replica;
  replica.collective->on_launch = [&](std::size_t index) { replica.collective->complete(index); };
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerOrder, TheUsedMapIsAgreedAfterAllBucketsHaveLeft) {
  Replica replica(GraphMode::kFindUnused);
  replica.step({2, 0});
  EXPECT_EQ(sizes_sent(replica), (std::vector<int64_t>{3, 2, 1, Replica::kNumParams}));
  const auto& used_map = replica.collective->all_reduces().back().tensor;
  EXPECT_EQ(used_map.scalar_type(), at::kInt);
}

TEST(ReducerOrder, AStaticGraphIsLearnedInOneStepWithoutOverlap) {
  Replica replica(GraphMode::kStatic);
  replica.step();
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "grad 1",
              "grad 0",
              "launch 0",
              "launch 1",
              "launch 2",
              "launch 3",
              "wait 0",
              "wait 1",
              "wait 2",
              "wait 3"}));
  replica.collective->clear();
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "launch 0",
              "grad 1",
              "launch 1",
              "grad 0",
              "launch 2",
              "wait 0",
              "wait 1",
              "wait 2"}));
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerRebuild, TheSecondForwardTakesTheArrivalOrder) {
  Replica replica(GraphMode::kDefault, BucketCaps{0, 0, {}});
  EXPECT_EQ(replica.reducer->plan().buckets().size(), 1u);
  replica.step({1, 2, 0});
  replica.collective->clear();
  replica.clear_grads();
  replica.step({1, 2, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"broadcast",
              "grad 1",
              "launch 0",
              "grad 2",
              "launch 1",
              "grad 0",
              "launch 2",
              "wait 0",
              "wait 1",
              "wait 2"}));
  EXPECT_EQ(sizes_sent(replica), (std::vector<int64_t>{2, 3, 1}));
  EXPECT_EQ(replica.grads(), kMeanGrads);
  EXPECT_FALSE(replica.reducer->prepare_forward()) << "once is enough";
}

TEST(ReducerRebuild, EveryRankTakesTheOrderOfRank0) {
  Replica replica(GraphMode::kDefault, BucketCaps{0, 0, {}}, /*gradient_as_bucket_view=*/false, 1);
  replica.collective->on_broadcast = [](const at::Tensor& order) {
    const Indices order_of_rank_0 = {0, 2, 1};
    std::copy(order_of_rank_0.begin(), order_of_rank_0.end(), order.mutable_data_ptr<int64_t>());
  };
  replica.step({2, 1, 0});
  ASSERT_TRUE(replica.reducer->prepare_forward());
  const auto plan = replica.reducer->plan();
  Indices launch_order;
  for (const auto& bucket : plan.buckets()) {
    ASSERT_EQ(bucket.param_indices.size(), 1u);
    launch_order.push_back(bucket.param_indices.front());
  }
  EXPECT_EQ(launch_order, (Indices{0, 2, 1}));
}

TEST(ReducerRebuild, FindUnusedNeverRebuilds) {
  Replica replica(GraphMode::kFindUnused);
  replica.step();
  EXPECT_FALSE(replica.reducer->prepare_forward());
}

// A hook between the outputs and w0 runs a backward that brings w1 and w2, as a reentrant
// checkpoint does.
void step_with_nested_backward(Replica& replica, bool repeat_w0) {
  replica.reducer->prepare_forward();
  const auto inner = replica.params[0].sum() * 12;
  inner.register_hook([&replica, repeat_w0](at::Tensor) {
    const c10::AutoGradMode record_graph(true);  // off in a backward
    auto nested = replica.params[1].sum() * 8 + replica.params[2].sum() * 6;
    if (repeat_w0) {
      nested = nested + replica.params[0].sum() * 12;
    }
    nested.backward();
  });
  const auto output = inner * 1;
  replica.reducer->watch_outputs({output});
  output.backward();
}

TEST(ReducerNestedBackward, TheStepEndsWithTheOuterOne) {
  Replica replica;
  step_with_nested_backward(replica, /*repeat_w0=*/false);
  EXPECT_EQ(replica.grads(), kMeanGrads);
  const auto& log = replica.collective->log;
  EXPECT_LT(
      std::find(log.begin(), log.end(), "grad 0"), std::find(log.begin(), log.end(), "wait 0"));
}

TEST(ReducerNestedBackward, AParamThatArrivesTwiceNeedsAStaticGraph) {
  Replica replica(GraphMode::kStatic);
  for (int step = 0; step < 2; ++step) {
    replica.clear_grads();
    step_with_nested_backward(replica, /*repeat_w0=*/true);
    EXPECT_EQ(replica.grads(), (Grads{60., 20., 15.}));
  }
}

TEST(ReducerNestedBackward, AParamThatArrivesTwiceIsAnErrorElsewhere) {
  Replica replica;
  try {
    step_with_nested_backward(replica, /*repeat_w0=*/true);
    FAIL() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"rank 0", "'w0'", "use_reentrant=False"});
  }
  EXPECT_EQ(replica.reducer->phase(), Phase::kIdle);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
