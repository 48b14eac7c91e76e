// A backward that runs within a node of another one, as reentrant checkpoints make them.
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "replica.h"

namespace ddpx {
namespace {

// Global, because the context of a custom function holds only what TorchScript can.
std::function<at::Tensor()> make_nested_loss;

// The identity; its backward first runs the backward of a loss that it makes there and then.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
    return input.clone();
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {
    const c10::AutoGradMode record_graph(true);
    make_nested_loss().backward();
    return grads;
  }
};

class ReducerNested : public testing::Test {
 protected:
  // The nested backward brings these gradients, which are 8 for w1, 6 for w2 and 12 for w0.
  void nest(const Indices& param_indices, GraphMode mode = GraphMode::kDefault) {
    replica = Replica(mode);
    make_nested_loss = [this, param_indices] {
      auto loss = at::ones({}, at::kDouble);
      for (const auto param_index : param_indices) {
        loss = loss + local_loss(param_index);
      }
      return loss;
    };
  }

  at::Tensor local_loss(std::size_t param_index) {
    return replica.params[param_index].sum() * *kLocalGrads[param_index];
  }

  // `outside` is upstream of the checkpoint, so its gradients come after the nested backward.
  void step(const at::Tensor& outside) {
    const auto output = Checkpoint::apply(outside) * 1;
    replica.reducer->watch_outputs({output});
    output.backward();
  }

  // The module is called without its wrapper: nothing tells where backward starts.
  void step_bypassing_the_wrapper(const at::Tensor& outside) {
    (Checkpoint::apply(outside) * 1).backward();
  }

  Replica replica;
};

TEST_F(ReducerNested, TheStepEndsWithTheOuterBackward) {
  nest({1, 2});
  step(local_loss(0));
  EXPECT_EQ(replica.grads(), kMeanGrads);
  const auto& log = replica.collective->log;
  EXPECT_LT(
      std::find(log.begin(), log.end(), "grad 0"), std::find(log.begin(), log.end(), "wait 0"));
}

TEST_F(ReducerNested, APartThatArrivedCountsThoughAHookClearsIt) {
  nest({0, 1, 2});
  step(local_loss(1));
  EXPECT_EQ(replica.grads(), (Grads{30., 40., 15.})) << "two parts of w1";
  replica.clear_grads();
  const auto key = replica.params[0].register_hook([this](at::Tensor) {
    ASSERT_TRUE(replica.params[1].grad().defined());
    replica.params[1].mutable_grad().reset();
  });
  step(at::ones({}, at::kDouble).set_requires_grad(true));  // one part only: it is never final
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_F(ReducerNested, TheNestedBackwardMayBringEveryGradient) {
  nest({0, 1, 2});
  step(at::ones({}, at::kDouble).set_requires_grad(true));
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

// How often it comes is learned in the first step.
TEST_F(ReducerNested, AParamMayArriveTwiceInEveryMode) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    nest({0, 1, 2}, mode);
    for (int i = 0; i < 3; ++i) {
      replica.clear_grads();
      step(local_loss(0));
      EXPECT_EQ(replica.grads(), (Grads{60., 20., 15.})) << mode_name(mode) << ", step " << i;
    }
  }
}

TEST_F(ReducerNested, ABucketLeavesWithTheLastPartOfItsGradient) {
  nest({0, 1, 2});
  replica.reducer->prepare_forward();
  step(local_loss(0));
  replica.clear_grads();
  replica.collective->clear();
  step(local_loss(0));
  const auto& log = replica.collective->log;
  const auto second_part = std::find(log.rbegin(), log.rend(), "grad 0").base();
  EXPECT_EQ(std::count(log.begin(), log.end(), "grad 0"), 2);
  EXPECT_LT(std::find(log.begin(), log.end(), "launch 1"), second_part) << "those of w2 and w1";
  EXPECT_EQ(Log(second_part, log.end()), (Log{"launch 2", "wait 0", "wait 1", "wait 2"}));
}

TEST_F(ReducerNested, FewerPartsThanEverLeaveAtTheEnd) {
  nest({0, 1, 2});
  step(local_loss(0));
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

// It is packed by then; peers must not wait for what follows it, and the error comes last.
TEST_F(ReducerNested, MorePartsThanEverAreAnErrorAtTheEnd) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    nest({0, 1, 2}, mode);
    replica.learn();
    try {
      step(local_loss(0));
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      const bool is_static = mode == GraphMode::kStatic;
      expect_mentions(
          error.what(),
          {"rank 0", "'w0'", is_static ? "static_graph=True" : "use_reentrant=False"});
    }
    const auto& log = replica.collective->log;
    EXPECT_EQ(std::count(log.begin(), log.end(), "wait 2"), 1);
    EXPECT_EQ(replica.grads()[1], 20.);
    EXPECT_EQ(replica.grads()[2], 15.);
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  }
}

TEST_F(ReducerNested, AfterMorePartsThanEverThatManyAreExpected) {
  nest({0, 1, 2});
  replica.learn();
  EXPECT_THROW(step(local_loss(0)), UserError);
  for (int i = 0; i < 2; ++i) {
    replica.clear_grads();
    step(local_loss(0));
    EXPECT_EQ(replica.grads(), (Grads{60., 20., 15.}));
  }
}

TEST_F(ReducerNested, TheRestMayComeFromAnOuterBackwardThatIsNotWatched) {
  nest({1, 2});
  step_bypassing_the_wrapper(local_loss(0));
  EXPECT_EQ(replica.grads(), kMeanGrads);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

// The node of the outer backward is the accumulator of w0, which leads to no other node.
TEST_F(ReducerNested, TheRestMayComeFromTheNodeThatRunsTheNestedBackward) {
  nest({1, 2});
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    const c10::AutoGradMode record_graph(true);
    make_nested_loss().backward();
  });
  replica.reducer->prepare_forward();
  local_loss(0).backward();
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.grads(), kMeanGrads);
  EXPECT_EQ(replica.collective->all_reduces().size(), Replica::kNumParams) << "one step";
}

// The prediction is that of the outer backward: the nested backward reaches neither w0 nor w1.
TEST_F(ReducerNested, AParamIsPredictedToBeUnusedWhereTheNestedBackwardBeginsTheStep) {
  nest({2}, GraphMode::kFindUnused);
  step(local_loss(0));
  replica.clear_grads();
  replica.reducer->prepare_forward();
  step(local_loss(0) + local_loss(1));  // w1 is known to come from the outer backward
  replica.clear_grads();
  replica.forget_calls();
  step(local_loss(0));
  const auto& log = replica.collective->log;
  const auto last = std::find(log.begin(), log.end(), "grad 0");
  EXPECT_EQ(
      std::count_if(
          log.begin(), last, [](const auto& event) { return event.rfind("launch", 0) == 0; }),
      2)
      << "the buckets of w2 and w1";
  EXPECT_EQ(replica.grads(), (Grads{30., std::nullopt, 15.}));
}

TEST_F(ReducerNested, WhatAnOuterBackwardThatIsNotWatchedNeverBringsIsReportedAtItsEnd) {
  nest({1, 2});
  replica.reducer->prepare_forward();
  try {
    step_bypassing_the_wrapper(at::ones({}, at::kDouble).set_requires_grad(true));
    FAIL() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"rank 0", "'w0'", "got no gradient in this backward"});
  }
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
