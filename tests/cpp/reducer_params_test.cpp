// Params that are not what they were when the reducer was made; and a backward that dies late.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "replica.h"

namespace ddpx {
namespace {

class ReducerFrozen : public testing::TestWithParam<GraphMode> {
 protected:
  Replica replica{GetParam()};
};

TEST_P(ReducerFrozen, NobodyWaitsForAFrozenParamOrNamesIt) {
  replica.learn();
  replica.params[1].set_requires_grad(false);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{30., std::nullopt, 15.}));
  EXPECT_EQ(
      replica.collective->all_reduces().size(), GetParam() == GraphMode::kFindUnused ? 4u : 3u);
}

TEST_P(ReducerFrozen, ItsGradientCountsAndIsNotWritten) {
  replica.learn();
  replica.params[1].set_requires_grad(false);
  replica.params[1].mutable_grad() = at::full({2}, 8., at::kDouble);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{30., 8., 15.}));
  EXPECT_EQ(replica.collective->all_reduces()[1].tensor[0].item<double>(), 20.);
}

TEST_P(ReducerFrozen, ItMayBeFrozenBeforeTheFirstStepAndTrainAgain) {
  replica.params[1].set_requires_grad(false);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{30., std::nullopt, 15.}));
  replica.params[1].set_requires_grad(true);
  if (GetParam() != GraphMode::kStatic) {  // whose first step never reached it
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

// The others send 4 for each gradient, and that they used each param.
TEST(ReducerFrozenHere, ItGetsTheAverageIfAnotherRankUsedIt) {
  for (const bool view : {false, true}) {
    Replica replica(GraphMode::kFindUnused, kParamABucket, view);
    replica.learn();
    replica.collective->peer_sends = [](const at::Tensor& own, int) {
      return at::full_like(own, own.scalar_type() == at::kInt ? 1. : 4.);
    };
    replica.params[1].set_requires_grad(false);
    replica.step();
    EXPECT_EQ(replica.grads()[1], 12.);
    replica.step();  // the kept gradient counts
    EXPECT_EQ(replica.grads()[1], 15.);
  }
}

// The gradient does not fit the bucket, and peers used the param.
TEST(ReducerFrozenHere, AGradientThatDoesNotFitStays) {
  Replica replica(GraphMode::kFindUnused);
  replica.learn();
  replica.collective->peer_sends = [](const at::Tensor& own, int) {
    return own.scalar_type() == at::kInt ? at::ones_like(own) : own;
  };
  replica.params[1].set_requires_grad(false);
  const auto grad = at::ones({2}, at::kDouble).to_sparse();
  replica.params[1].mutable_grad() = grad;
  expect_mentions(replica.failing_step(), {"'w1'", "a sparse"});
  EXPECT_TRUE(replica.params[1].grad().is_same(grad));
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerFrozen,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

TEST(ReducerCast, AParamThatWasCastIsReportedAtTheNextForward) {
  Replica replica;
  replica.learn();
  replica.params[1].set_data(replica.params[1].to(at::kFloat));
  expect_mentions(replica.failing_step(), {"rank 0", "changed dtype", "'w1'"});
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

TEST(ReducerCast, OrAtTheFirstGradient) {
  Replica replica;
  replica.learn();
  replica.params[1].set_data(replica.params[1].to(at::kFloat));
  try {
    (replica.params[0].sum() * replica.params[1].sum()).backward();
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"changed dtype", "'w1'"});
  }
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST(ReducerCast, AParamThatWasCastToAndFroIsAveragedAgain) {
  Replica replica;
  replica.learn();
  auto& param = replica.params[1];
  param.set_data(param.to(at::kFloat));
  param.set_data(param.to(at::kDouble));
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerCast, AFrozenParamMayBeCastToAndFro) {
  Replica replica;
  replica.learn();
  auto& param = replica.params[1];
  param.set_requires_grad(false);
  param.set_data(param.to(at::kFloat));
  param.set_data(param.to(at::kDouble));
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{30., std::nullopt, 15.}));
  param.set_requires_grad(true);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerCast, AParamOfAnotherSizeIsReported) {
  Replica replica;
  replica.learn();
  auto& param = replica.params[1];
  param.set_data(param.to(at::kFloat));
  param.set_data(at::ones({5}, at::kDouble));
  expect_mentions(replica.failing_step(), {"changed dtype, device or shape", "'w1'"});
}

TEST(ReducerFrozenHere, ItsGradientIsNotCheckedForNan) {
  for (const int num_ranks : {1, 4}) {
    Replica replica;
    replica.reducer->set_collective(std::make_shared<FakeCollective>(0, num_ranks));
    set_check_finite(*replica.reducer, true);
    replica.params[1].set_requires_grad(false);
    replica.params[1].mutable_grad() = at::full({2}, std::nan(""), at::kDouble);
    EXPECT_NO_THROW(replica.step());
  }
}

TEST(ReducerBystander, OneThatWasUnfrozenIsReported) {
  const auto param = at::ones({2}, at::kDouble).set_requires_grad(true);
  const auto frozen = at::ones({2}, at::kDouble);
  const auto collective = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto reducer = Reducer::create(
      {{param, "weight", false}},
      ReducerOptions{kOneBucket, GraphMode::kDefault, false},
      collective,
      {{frozen, "frozen.weight", false}});
  EXPECT_NO_THROW(reducer->prepare_forward());
  frozen.set_requires_grad(true);
  try {
    reducer->prepare_forward();
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"did not require a gradient when", "'frozen.weight'"});
  }
  EXPECT_THROW((param * frozen).sum().backward(), UserError);
  frozen.set_requires_grad(false);
  param.mutable_grad().reset();
  EXPECT_NO_THROW((param * frozen).sum().backward());
  EXPECT_TRUE(param.grad().equal(at::full({2}, 2.5, at::kDouble)));
}

class ReducerAbort : public testing::TestWithParam<GraphMode> {};

// Its peers have left for the collectives, and cannot know that this backward dies.
TEST_P(ReducerAbort, AfterTheLastGradientItLetsPeersFinish) {
  for (const bool first_step : {true, false}) {
    Replica replica(GetParam());
    if (!first_step) {
      replica.learn();
    }
    const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
    input.register_hook([](at::Tensor) -> void { throw std::domain_error("dies late"); });
    EXPECT_THROW(replica.forward({2, 1, 0}, input).backward(), std::domain_error);
    const bool agrees_on_use =
        GetParam() == GraphMode::kFindUnused || (GetParam() == GraphMode::kStatic && first_step);
    EXPECT_EQ(replica.collective->all_reduces().size(), agrees_on_use ? 4u : 3u);
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerAbort,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

}  // namespace
}  // namespace ddpx
