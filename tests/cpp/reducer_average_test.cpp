// Sums over ranks, and averages by weight.
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "readiness/grad_versions.h"
#include "replica.h"

namespace ddpx {
namespace {

Replica with_average(Average average, bool view = false, GraphMode mode = GraphMode::kDefault) {
  ReducerOptions options{kParamABucket, mode, view};
  options.average = average;
  options.module_name = "Net";
  return Replica(options);
}

void weighted_step(Replica& replica, double weight) {
  replica.clear_grads();
  replica.reducer->set_weight(weight);
  replica.step();
}

// The loss of Replica::forward(), without the wrapper.
at::Tensor bypass(const Replica& replica) {
  return replica.params[0].sum() * replica.params[1].sum() * replica.params[2].sum();
}

// Of 4 ranks, each sends (its rank + 1) times what this rank sends, so sums are 10 times its own.
TEST(ReducerAverage, SumsAreNotDivided) {
  for (const bool view : {false, true}) {
    auto replica = with_average(Average::kSum, view);
    for (int step = 0; step < 3; ++step) {
      replica.clear_grads();
      replica.step();
      EXPECT_EQ(replica.grads(), (Grads{120., 80., 60.})) << "step " << step;
    }
  }
}

TEST(ReducerAverage, SumsAreDividedByTheSumOfWeights) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    for (const bool view : {false, true}) {
      auto replica = with_average(Average::kWeights, view, mode);
      for (int step = 0; step < 3; ++step) {
        weighted_step(replica, 2);  // 20 on all ranks
        EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.})) << mode_name(mode) << ", step " << step;
      }
    }
  }
}

TEST(ReducerAverage, TheSumOfWeightsTravelsBeforeTheFirstBucket) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(2);
  replica.step();
  replica.collective->clear();
  weighted_step(replica, 2);
  ASSERT_EQ(replica.collective->all_reduces().size(), 4U);
  EXPECT_EQ(replica.collective->all_reduces()[0].tensor.numel(), 1);
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"broadcast",
              "grad 2",
              "launch 0",
              "launch 1",
              "grad 1",
              "launch 2",
              "grad 0",
              "launch 3",
              "wait 1",
              "wait 0",
              "wait 2",
              "wait 3"}));
}

TEST(ReducerAverage, AMeanMakesNoFurtherCall) {
  Replica replica;
  replica.learn();
  replica.step();
  EXPECT_EQ(replica.collective->all_reduces().size(), Replica::kNumParams);
}

TEST(ReducerAverage, WeightsOfLocalBackwardsAddUp) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_sync_enabled(false);
  replica.reducer->set_weight(1);
  replica.step();
  replica.reducer->set_sync_enabled(true);
  replica.reducer->set_weight(3);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));  // 240 / 40
}

// The gradients of local backwards stay, so their weights stay, too.
TEST(ReducerAverage, WeightsOfLocalBackwardsStayWhereTheReducerStartsOver) {
  const std::vector<std::function<void(Reducer&, std::shared_ptr<Collective>)>> ways = {
      [](Reducer& reducer, const auto&) { reducer.set_static_graph(); },
      [](Reducer& reducer, const auto& group) { reducer.set_collective(group); },
  };
  for (const auto& start_over : ways) {
    auto replica = with_average(Average::kWeights);
    replica.reducer->set_sync_enabled(false);
    replica.reducer->set_weight(1);
    replica.step();
    replica.reducer->set_sync_enabled(true);
    start_over(*replica.reducer, replica.collective);
    replica.reducer->set_weight(3);
    replica.step();
    EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));  // 240 / 40
  }
}

TEST(ReducerAverage, LostWeightsAreReportedInANewGroup) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_sync_enabled(false);
  replica.reducer->set_weight(1);
  replica.step();
  replica.reducer->set_sync_enabled(true);
  replica.reducer->reset();
  replica.reducer->set_collective(replica.collective);
  replica.reducer->set_weight(3);
  expect_mentions(replica.failing_step(), {"weights of earlier forwards are forgotten"});
}

// A collective call of the script failed between forward and backward, for example.
TEST(ReducerAverage, AForwardWithoutABackwardDoesNotCountInANewGroup) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(5);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer->set_collective(replica.collective);
  replica.reducer->set_weight(3);
  replica.step();
  const auto grads = replica.grads();
  auto other = with_average(Average::kWeights);
  other.reducer->set_weight(3);
  other.step();
  EXPECT_EQ(grads, other.grads());
}

// The gradients remain after the second call, too.
TEST(ReducerAverage, LostWeightsStayLostWhereTheScriptResetsTwice) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_sync_enabled(false);
  replica.reducer->set_weight(1);
  replica.step();
  replica.reducer->set_sync_enabled(true);
  replica.reducer->reset();
  replica.reducer->reset();
  replica.reducer->set_weight(3);
  expect_mentions(replica.failing_step(), {"weights of earlier forwards are forgotten"});
  replica.clear_grads();
  replica.reducer->reset();
  weighted_step(replica, 2);
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, AForwardWithoutAWeightRaises) {
  auto replica = with_average(Average::kWeights);
  expect_mentions(
      replica.failing_step(), {"rank 0", "Net", "this forward has no weight", "set_weight"});
  weighted_step(replica, 2);
  expect_mentions(replica.failing_step(), {"this forward has no weight"});
}

// As a checkpoint of the wrapper makes it.
TEST(ReducerAverage, AForwardWithinABackwardNeedsNoWeight) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(2);
  const auto loss = replica.forward({2, 1, 0});
  loss.register_hook(
      [&](const at::Tensor&) { EXPECT_NO_THROW(replica.reducer->prepare_forward()); });
  loss.backward();
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, ASecondBackwardOfOneForwardRaises) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(2);
  const auto loss = replica.forward({2, 1, 0});
  loss.backward({}, /*retain_graph=*/true);
  replica.clear_grads();
  try {
    loss.backward();
    FAIL() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"Net", "no forward since the last averaged backward"});
  }
  weighted_step(replica, 2);
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, ASecondBackwardOfOneForwardTakesAWeightOfItsOwn) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(2);
  const auto loss = replica.forward({2, 1, 0});
  loss.backward({}, /*retain_graph=*/true);
  replica.clear_grads();
  replica.reducer->set_weight(4);
  loss.backward();
  EXPECT_EQ(replica.grads(), (Grads{3., 2., 1.5}));
}

// The weight that was set with cleared gradients is that of a later forward, whose gradients stay.
TEST(ReducerAverage, ClearedGradientsAreOfNoConsequenceAfterAStep) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(1);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer->set_sync_enabled(false);
  loss.backward({}, /*retain_graph=*/true);
  replica.clear_grads();
  replica.reducer->set_weight(1);
  replica.reducer->set_sync_enabled(true);
  loss.backward();
  replica.clear_grads();
  replica.reducer->set_sync_enabled(false);
  replica.step();
  replica.reducer->set_sync_enabled(true);
  replica.reducer->set_weight(3);
  bypass(replica).backward();
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));  // 240 / 40
}

// A step of a penalty alone takes the weight of the forward. Later backwards take their own.
TEST(ReducerAverage, AWeightAfterAStepOfAPenaltyCounts) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(2);
  const auto loss = replica.forward({2, 1, 0});
  const auto grad = torch::autograd::grad(
      {loss}, {replica.params[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  (grad[0].sum() * replica.params[0].sum()).backward();
  replica.clear_grads();
  replica.reducer->set_sync_enabled(false);
  replica.reducer->set_weight(1);
  bypass(replica).backward();
  replica.reducer->set_sync_enabled(true);
  replica.reducer->set_weight(3);
  bypass(replica).backward();
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));  // 240 / 40
}

TEST(ReducerAverage, TheWeightOfAForwardWithoutABackwardRaises) {
  for (const double weight : {5., 0.}) {
    auto replica = with_average(Average::kWeights);
    replica.reducer->set_weight(weight);
    replica.forward({2, 1, 0});
    replica.reducer->set_weight(2);
    if (weight == 0) {
      replica.step();
      EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
    } else {
      expect_mentions(replica.failing_step(), {"Net", "no backward has reached", "no_grad()"});
      weighted_step(replica, 2);
      EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
    }
  }
}

TEST(ReducerAverage, ASumOfZeroRaisesAtTheEnd) {
  auto replica = with_average(Average::kWeights);
  replica.reducer->set_weight(0);
  expect_mentions(replica.failing_step(), {"sum to 0", "NaN"});
  for (const auto& param : replica.params) {
    EXPECT_TRUE(std::isnan(param.grad().sum().item<double>()));
  }
  weighted_step(replica, 2);
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, TheFirstErrorOfAStepIsRaised) {
  auto replica = with_average(Average::kWeights);
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return at::zeros_like(own); };
  set_check_finite(*replica.reducer, true);
  const auto key = replica.params[2].register_hook([](const at::Tensor& grad) { return grad / 0; });
  replica.reducer->set_weight(0);
  const auto error = replica.failing_step();
  replica.params[2].remove_hook(key);
  expect_mentions(error, {"NaN or infinity", "'w2'"});
  EXPECT_EQ(error.find("sum to 0"), std::string::npos) << error;
}

TEST(ReducerAverage, ABadWeightOfAPeerRaises) {
  auto replica = with_average(Average::kWeights);
  replica.collective->peer_sends = [](const at::Tensor& own, int) {
    return own.numel() == 1 ? own * std::nan("") : own;
  };
  replica.reducer->set_weight(2);
  expect_mentions(replica.failing_step(), {"a weight of another rank"});
}

TEST(ReducerAverage, AnAbortForgetsTheWeights) {
  auto replica = with_average(Average::kWeights);
  weighted_step(replica, 2);
  replica.clear_grads();
  replica.reducer->set_sync_enabled(false);
  replica.reducer->set_weight(100);
  const auto key = replica.params[0].register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on purpose"); });
  EXPECT_THROW(replica.step(), std::runtime_error);
  replica.params[0].remove_hook(key);
  replica.reducer->set_sync_enabled(true);
  weighted_step(replica, 2);
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, KeptSumsRaise) {
  for (const auto average : {Average::kSum, Average::kWeights}) {
    auto replica = with_average(average);
    weighted_step(replica, 2);
    replica.reducer->set_weight(2);
    expect_mentions(replica.failing_step(), {"3 parameters still have", "'w0'", "zero_grad()"});
  }
}

TEST(ReducerAverage, KeptSumsRaiseAtEachTry) {
  auto replica = with_average(Average::kSum);
  replica.step();
  for (int i = 0; i < 2; ++i) {
    expect_mentions(replica.failing_step(), {"3 parameters still have"});
  }
}

// The gradients are zeros then, and not undefined.
TEST(ReducerAverage, TheWeightOfAForwardThatRaisedForKeptSumsIsForgotten) {
  auto replica = with_average(Average::kWeights);
  weighted_step(replica, 2);
  replica.reducer->set_weight(2);
  replica.failing_step();
  for (const auto& param : replica.params) {
    param.grad().zero_();
  }
  replica.reducer->set_weight(2);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{6., 4., 3.}));
}

TEST(ReducerAverage, ClearedSumsDoNotRaise) {
  auto replica = with_average(Average::kSum);
  for (int step = 0; step < 3; ++step) {
    replica.step();
    EXPECT_EQ(replica.grads(), (Grads{120., 80., 60.}));
    for (const auto& param : replica.params) {
      step == 0 ? param.grad().zero_() : param.grad().variable_data().zero_();  // as .data
    }
  }
}

TEST(ReducerAverage, AStepWithoutInputsHasWeightZero) {
  auto replica = with_average(Average::kWeights);
  at::Tensor sent;
  replica.collective->on_launch = [&](std::size_t index) {
    if (index == 0) {
      sent = replica.collective->all_reduces()[0].tensor.clone();
    }
  };
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own + 1; };
  replica.reducer->shadow_step();
  EXPECT_EQ(sent.item<double>(), 0);
  EXPECT_EQ(replica.collective->all_reduces().size(), 1 + Replica::kNumParams);
}

TEST(GradVersions, AReplacedGradientIsNotKept) {
  auto param = at::ones({2}, at::kDouble);
  param.set_requires_grad(true);
  param.mutable_grad() = at::ones({2}, at::kDouble);
  GradVersions kept;
  EXPECT_TRUE(kept.empty());
  kept.record({param});
  EXPECT_EQ(kept.pop_unchanged({param}), Indices{0});
  EXPECT_TRUE(kept.empty());
  kept.record({param});
  param.mutable_grad() = at::ones({2}, at::kDouble);
  EXPECT_EQ(kept.pop_unchanged({param}), Indices{});
}

}  // namespace
}  // namespace ddpx
