// When collectives leave, in which order, and in which order they may complete.
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
  replica.learn();
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
  replica.learn();
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
    Replica fresh;
    Replica taught;
    taught.learn({2, 1, 0});
    for (auto* replica : {&fresh, &taught}) {
      replica->step(arrival_order);
      EXPECT_EQ(sizes_sent(*replica), (std::vector<int64_t>{3, 2, 1}));
      EXPECT_EQ(replica->grads(), kMeanGrads);
    }
  } while (std::next_permutation(arrival_order.begin(), arrival_order.end()));
}

TEST(ReducerOrder, CollectivesMayCompleteInAnyOrder) {
  Indices completion_order = {0, 1, 2};
  do {
    Replica replica;
    replica.learn();
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
  replica.learn();
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

class ReducerLearning : public testing::TestWithParam<GraphMode> {};

TEST_P(ReducerLearning, TheFirstStepIsWithoutOverlap) {
  Replica replica(GetParam());
  const bool agrees_on_use = GetParam() != GraphMode::kDefault;
  replica.step();
  Log expected = {"grad 2", "grad 1", "grad 0", "launch 0", "launch 1", "launch 2"};
  if (agrees_on_use) {
    expected.push_back("launch 3");
  }
  expected.insert(expected.end(), {"wait 0", "wait 1", "wait 2"});
  EXPECT_EQ(replica.collective->log, expected);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerLearning,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

TEST(ReducerOrder, AStaticGraphIsLearnedInOneStep) {
  Replica replica(GraphMode::kStatic);
  replica.learn();
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
  EXPECT_EQ(replica.reducer->state().plan().buckets().size(), 1u);
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
  const auto plan = replica.reducer->state().plan();
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

TEST(ReducerOrder, AnOrderThatRank0DidNotSendIsAnErrorOfTheScript) {
  for (const auto& stray :
       {std::vector<int64_t>{0, 1, 7},
        std::vector<int64_t>{0, -1, 2},
        std::vector<int64_t>{0, 1, 1}}) {
    Replica replica;
    replica.step({2, 1, 0});
    replica.collective->on_broadcast = [&](const at::Tensor& order) {
      std::copy(stray.begin(), stray.end(), order.mutable_data_ptr<int64_t>());
    };
    expect_mentions(
        error_of([&] { replica.reducer->prepare_forward(); }),
        {"the order in which gradients arrived", "different collective calls"});
  }
}

}  // namespace
}  // namespace ddpx
