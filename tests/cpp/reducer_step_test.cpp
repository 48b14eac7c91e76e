// What gradients are after a step, in every mode.
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

struct Options {
  std::string name;
  GraphMode mode;
  BucketCaps caps;
  bool gradient_as_bucket_view;
};

std::vector<Options> all_options() {
  std::vector<Options> all;
  for (const bool view : {false, true}) {
    const std::string suffix = view ? "View" : "";
    all.push_back({"Default" + suffix, GraphMode::kDefault, {0, 0, {}}, view});
    all.push_back({"DefaultOneBucket" + suffix, GraphMode::kDefault, kOneBucket, view});
    all.push_back({"Static" + suffix, GraphMode::kStatic, {0, 0, {}}, view});
    all.push_back({"FindUnused" + suffix, GraphMode::kFindUnused, kParamABucket, view});
    all.push_back({"FindUnusedOneBucket" + suffix, GraphMode::kFindUnused, kOneBucket, view});
  }
  return all;
}

class ReducerStep : public testing::TestWithParam<Options> {
 protected:
  Replica make_replica() const {
    const auto& options = GetParam();
    return Replica(options.mode, options.caps, options.gradient_as_bucket_view);
  }
};

TEST_P(ReducerStep, GradientsAreMeans) {
  auto replica = make_replica();
  for (int step = 0; step < 4; ++step) {
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads) << "step " << step;
  }
}

TEST_P(ReducerStep, KeptGradientsAreAddedToAndAveragedAgain) {
  auto replica = make_replica();
  replica.step();
  replica.step();
  // 2.5 times the sum of the first mean and the new local gradient.
  EXPECT_EQ(replica.grads(), (Grads{105., 70., 52.5}));
}

TEST_P(ReducerStep, WithoutSyncNothingIsLaunchedAndGradientsAddUp) {
  auto replica = make_replica();
  replica.reducer->set_sync_enabled(false);
  replica.step();
  replica.step();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_EQ(replica.grads(), (Grads{24., 16., 12.}));
  replica.reducer->set_sync_enabled(true);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{90., 60., 45.}));
}

TEST_P(ReducerStep, GradientsLieInBucketsWhereViewsAreAskedFor) {
  auto replica = make_replica();
  replica.step();
  const auto& sent = replica.collective->all_reduces();
  for (const auto& param : replica.params) {
    bool lies_in_bucket = false;
    for (const auto& all_reduce : sent) {
      lies_in_bucket = lies_in_bucket || param.grad().is_alias_of(all_reduce.tensor);
    }
    EXPECT_EQ(lies_in_bucket, GetParam().gradient_as_bucket_view);
  }
}

// Otherwise the first step needs the memory of all gradients and of all buckets.
TEST_P(ReducerStep, TheFirstStepMovesGradientsIntoViewsAsTheyArrive) {
  auto replica = make_replica();
  at::Tensor arrived;
  replica.params[0].register_hook([&](at::Tensor) { arrived = replica.params[2].grad(); });
  replica.step({2, 1, 0});
  bool lies_in_bucket = false;
  for (const auto& all_reduce : replica.collective->all_reduces()) {
    lies_in_bucket = lies_in_bucket || arrived.is_alias_of(all_reduce.tensor);
  }
  EXPECT_EQ(lies_in_bucket, GetParam().gradient_as_bucket_view);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(
    Options, ReducerStep, testing::ValuesIn(all_options()), [](const auto& info) {
      return info.param.name;
    });

// Every peer used every param: in its used-map are ones, and in its buckets what adds 12 to a mean.
at::Tensor peer_that_uses_all(const at::Tensor& own, int) {
  return own.scalar_type() == at::kInt ? at::ones_like(own) : own + 4;
}

class ReducerUnused : public testing::TestWithParam<bool> {
 protected:
  Replica replica{GraphMode::kFindUnused, kParamABucket, /*gradient_as_bucket_view=*/GetParam()};
};

TEST_P(ReducerUnused, AParamThatNoRankUsedKeepsItsGradientUndefined) {
  replica.step({2, 0});
  // Without w1 the local gradients are 4 and 2.
  EXPECT_EQ(replica.grads(), (Grads{10., std::nullopt, 5.}));
  replica.step({2, 1, 0});
  EXPECT_TRUE(replica.grads()[1].has_value()) << "used in this step";
}

TEST_P(ReducerUnused, AParamThatNoRankUsedKeepsTheGradientItHas) {
  replica.step({2, 1, 0});
  // A view takes part in the all-reduce: it comes back as it was, because ranks kept the same mean.
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own; };
  replica.step({2, 0});
  EXPECT_EQ(replica.grads()[1], 20.);
}

TEST_P(ReducerUnused, AParamThatOnlyPeersUsedGetsTheirMean) {
  replica.collective->peer_sends = peer_that_uses_all;
  replica.step({2, 0});
  EXPECT_EQ(replica.grads(), (Grads{16., 12., 14.}));
}

TEST_P(ReducerUnused, UseWithoutSyncCountsInTheNextSynchronisedStep) {
  replica.reducer->set_sync_enabled(false);
  replica.step({2, 1, 0});
  replica.reducer->set_sync_enabled(true);
  replica.step({2, 0});
  EXPECT_EQ(replica.grads()[1], 20.);
}

INSTANTIATE_TEST_SUITE_P(Views, ReducerUnused, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

// As in DDP, the average has the change. The gradient of the first step lies in its slot when it
// arrives.
TEST(ReducerViews, AChangeOfAGradientInItsSlotIsNoError) {
  Replica replica(GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/true);
  const auto key = replica.params[0].register_hook(
      [&](at::Tensor) { replica.params[2].mutable_grad().mul_(2); });  // after its arrival
  replica.step({2, 1, 0});
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.grads(), (Grads{30., 20., 30.}));
}

TEST(ReducerViews, TheHistoryOfAGradientEndsWithItsStep) {
  Replica replica(GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/true);
  replica.learn();
  replica.step();
  replica.params[0].mutable_grad().mul_(at::ones({}, at::kDouble).set_requires_grad(true));
  EXPECT_TRUE(replica.params[0].grad().requires_grad());
  replica.clear_grads();
  replica.step();
  EXPECT_FALSE(replica.params[0].grad().requires_grad());
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerStatic, AParamThatTheGraphNeverReachesKeepsItsGradientUndefined) {
  Replica replica(GraphMode::kStatic);
  for (int step = 0; step < 4; ++step) {
    replica.clear_grads();
    replica.collective->clear();
    replica.step({2, 0});
    EXPECT_EQ(replica.grads(), (Grads{10., std::nullopt, 5.})) << "step " << step;
    // Ranks agree in the first step, and remember.
    EXPECT_EQ(replica.collective->all_reduces().size(), step == 0 ? 4u : 3u);
  }
}

TEST(ReducerSparse, AnAverageByWeightMayHaveARowTwice) {
  const auto weight = at::ones({4, 2}, at::kDouble).set_requires_grad(true);
  ReducerOptions options{kOneBucket, GraphMode::kDefault, false};
  options.average = Average::kWeights;
  const auto reducer =
      Reducer::create({{weight, "weight", true}}, options, std::make_shared<FakeCollective>(0, 2));
  reducer->set_weight(1);
  reducer->prepare_forward();
  const auto rows = at::tensor({3, 1, 3}, at::kLong);
  const auto output = at::embedding(weight, rows, -1, false, /*sparse=*/true).sum();
  reducer->watch_outputs({output});
  output.backward();
  const auto sum = weight.grad().coalesce();
  EXPECT_EQ(sum._nnz(), 2);
  EXPECT_TRUE(sum._values().equal(at::tensor({1., 1., 2., 2.}, at::kDouble).view({2, 2})));
}

TEST(ReducerSparse, ASparseGradientIsAveragedInABucketOfItsOwn) {
  const auto weight = at::ones({4, 2}, at::kDouble).set_requires_grad(true);
  const auto bias = at::ones({2}, at::kDouble).set_requires_grad(true);
  const auto collective = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto reducer = Reducer::create(
      {{weight, "weight", true}, {bias, "bias", false}},
      ReducerOptions{kOneBucket, GraphMode::kDefault, false},
      collective);
  EXPECT_EQ(reducer->state().plan().buckets().size(), 2u);
  const auto rows = at::tensor({3, 1, 3}, at::kLong);
  const auto picked = at::embedding(weight, rows, -1, false, /*sparse=*/true);
  (picked + bias).sum().backward();
  ASSERT_TRUE(weight.grad().is_sparse());
  const auto expected = at::tensor({0., 0., 2.5, 2.5, 0., 0., 5., 5.}, at::kDouble).view({4, 2});
  EXPECT_TRUE(weight.grad().to_dense().equal(expected)) << weight.grad().to_dense();
  EXPECT_TRUE(bias.grad().equal(at::ones({2}, at::kDouble) * 7.5)) << bias.grad();
}

}  // namespace
}  // namespace ddpx
