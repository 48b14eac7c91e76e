// Several reducers of the same params: one of them averages, and all keep their settings.
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

// A second reducer of params of a replica.
struct Second {
  explicit Second(const Replica& replica, std::size_t num_params = Replica::kNumParams)
      : collective(std::make_shared<FakeCollective>(0, Replica::kWorldSize)) {
    std::vector<ReducerParam> params;
    for (std::size_t i = 0; i < num_params; ++i) {
      params.push_back({replica.params[i], "w" + std::to_string(i), false});
    }
    const ReducerOptions options{kOneBucket, GraphMode::kDefault, false};
    reducer = Reducer::create(params, options, collective);
    reducer->prepare_forward();
  }

  std::size_t num_launches() const {
    return collective->all_reduces().size();
  }

  std::shared_ptr<FakeCollective> collective;
  std::shared_ptr<Reducer> reducer;
};

TEST(ReducerOwner, OnlyTheOwnerAverages) {
  Replica replica;
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  EXPECT_TRUE(replica.reducer->yielded());
  replica.step();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(second.num_launches(), 1u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerOwner, TheOldReducerTakesTheParamsBack) {
  Replica replica;
  replica.learn();
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  replica.step();
  replica.clear_grads();
  second.reducer->yield_to(*replica.reducer);
  replica.reducer->take_back();
  EXPECT_FALSE(replica.reducer->yielded());
  replica.step();
  EXPECT_EQ(second.num_launches(), 1u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
  EXPECT_FALSE(replica.reducer->state().arrival_order().empty());
}

TEST(ReducerOwner, AReducerWhoseOwnerIsGoneWaitsForItsForward) {
  Replica replica;
  {
    Second second(replica);
    replica.reducer->yield_to(*second.reducer);
  }
  EXPECT_FALSE(replica.reducer->yielded());
  EXPECT_THROW(replica.step(), UserError);
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  replica.clear_grads();
  replica.reducer->take_back();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerOwner, AnOutputOfTheLargerReducerTakesTheParamsBack) {
  Replica replica;
  const auto loss = replica.forward({2, 1, 0});
  Second part(replica, 2);
  replica.reducer->yield_to(*part.reducer);
  loss.backward();
  EXPECT_FALSE(replica.reducer->yielded());
  EXPECT_TRUE(part.reducer->yielded());
  EXPECT_EQ(part.num_launches(), 0u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerOwner, AReducerThatHasFailedGivesTheParamsBack) {
  Replica replica;
  const auto loss = replica.forward({2, 1, 0});
  Second part(replica, 2);
  replica.reducer->yield_to(*part.reducer);
  part.collective->on_wait = [&](std::size_t i) { part.collective->fail(i, "on purpose"); };
  part.collective->on_allocate = [] { throw std::bad_alloc(); };  // so no recovery
  EXPECT_THROW((replica.params[0].sum() * replica.params[1].sum()).backward(), UserError);
  EXPECT_EQ(part.reducer->state().phase(), Phase::kFailed);
  replica.clear_grads();
  loss.backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerOwner, AnOutputOfAReducerWithOtherParamsRaises) {
  Replica replica;
  const auto loss = replica.forward({2, 1, 0});
  const auto foreign = at::ones({2}, at::kDouble).set_requires_grad(true);
  const auto collective = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto other = Reducer::create(
      {{replica.params[0], "w0", false}, {foreign, "foreign", false}},
      {kOneBucket, GraphMode::kDefault, false},
      collective);
  replica.reducer->yield_to(*other);
  std::string text;
  try {
    loss.backward();
  } catch (const UserError& error) {
    text = error.what();
  }
  expect_mentions(text, {"'w1'", "'w2'", "would not be averaged"});
  EXPECT_EQ(text.find("'w0'"), std::string::npos) << text;
}

TEST(ReducerOwner, AReducerThatHasYieldedAllowsAutogradGradWhereABackwardWasPrepared) {
  Replica replica;
  replica.reducer->prepare_for_backward();
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  const auto grads = torch::autograd::grad({replica.params[1].sum()}, {replica.params[1]});
  EXPECT_EQ(grads.front()[0].item<double>(), 1.);
}

TEST(ReducerOwner, ABackwardForInputsTakesNoParamsBack) {
  Replica replica;
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  const auto loss = replica.forward({2, 1, 0}, input);
  Second part(replica, 2);
  replica.reducer->yield_to(*part.reducer);
  torch::autograd::backward({loss}, {}, std::nullopt, false, {input});
  EXPECT_TRUE(replica.reducer->yielded());
}

TEST(ReducerOwner, AReducerThatHasYieldedMakesNoStepOfALossThatReachesNoParam) {
  Replica replica(GraphMode::kFindUnused);
  replica.learn();
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  const auto output = at::ones({}, at::kDouble).set_requires_grad(true) * 2;
  replica.reducer->watch_outputs({output});
  output.backward();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

// The owner knows of the gradients.
TEST(ReducerOwner, AReducerThatHasYieldedRemembersNoGradientOfAutogradGrad) {
  Replica replica;
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  torch::autograd::grad({replica.forward({2, 1, 0})}, {replica.params[0]});
  {
    const at::NoGradGuard no_grad;
    replica.params[0].mul_(1);
  }
  EXPECT_NO_THROW(replica.reducer->prepare_forward());
}

TEST(ReducerOwner, AReducerThatHasYieldedExpectsNoBackward) {
  Replica replica;
  replica.forward({2, 1, 0});
  Second second(replica);
  replica.reducer->yield_to(*second.reducer);
  EXPECT_NO_THROW(replica.reducer->set_manual_finalization(true));
}

TEST(ReducerOwner, NoReducerYieldsWithinABackward) {
  Replica replica;
  Second second(replica);
  second.reducer->yield_to(*replica.reducer);
  std::string text;
  replica.params[1].register_hook([&](at::Tensor) {
    try {
      replica.reducer->yield_to(*second.reducer);
    } catch (const UserError& error) {
      text = error.what();
    }
  });
  replica.step();
  expect_mentions(text, {"while a backward runs"});
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
