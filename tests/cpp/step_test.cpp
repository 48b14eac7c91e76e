// One step without autograd and without a process group: gradients are assigned, then arrive.
#include "reducer/step.h"
#include "reducer/empty_step.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "fake_collective.h"
#include "replica.h"

namespace ddpx {
namespace {

constexpr std::size_t kStepParams = 3;

// Rank 0 of 4 with three params of one element, a bucket each: param 2 is launched first.
struct Ranks {
  explicit Ranks(const ReducerOptions& options = {kParamABucket, GraphMode::kDefault, false})
      : collective(std::make_shared<FakeCollective>(0, 4)) {
    std::vector<ReducerParam> params;
    for (std::size_t i = 0; i < kStepParams; ++i) {
      tensors.push_back(at::zeros({1}, at::kDouble).set_requires_grad(true));
      params.push_back({tensors.back(), "w" + std::to_string(i), false});
    }
    context = std::make_unique<ReducerContext>(Params(params, {}), options, collective);
    context->replace_buckets(context->buckets.plan());
    context->history.had_forward = true;
    lock = context->mutex.lock_to_change();
  }

  // The gradient of the param becomes `value` and arrives.
  void arrive(Step& step, std::size_t param_index, double value) {
    tensors[param_index].mutable_grad() = at::full({1}, value, at::kDouble);
    step.arrive(param_index);
  }

  // A step in which the first `num_arrivals` params get the gradient 4. Afterwards arrivals are
  // final at once.
  void learn(std::size_t num_arrivals = kStepParams) {
    Step step(*context);
    step.begin();
    for (std::size_t i = 0; i < num_arrivals; ++i) {
      arrive(step, i, 4);
    }
    step.finish();
    context->history.arrivals.learn(step.arrivals());
    context->history.use.static_use_known = true;
    ++context->progress.num_steps;
    collective->clear();
  }

  std::optional<double> grad(std::size_t param_index) const {
    const auto& grad = tensors[param_index].grad();
    return grad.defined() ? std::make_optional(grad.item<double>()) : std::nullopt;
  }

  std::shared_ptr<FakeCollective> collective;
  std::vector<at::Tensor> tensors;
  std::unique_ptr<ReducerContext> context;
  ExclusiveMutex::Lock lock;  // the methods of Step need the mutex
};

TEST(Step, NothingIsLaunchedBeforeTheFirstStepEnds) {
  Ranks ranks;
  Step step(*ranks.context);
  step.begin();
  for (std::size_t i = 0; i < kStepParams; ++i) {
    ranks.arrive(step, i, 4);
  }
  EXPECT_TRUE(ranks.collective->all_reduces().empty());
  step.finish();
  EXPECT_EQ(ranks.collective->all_reduces().size(), kStepParams);
  EXPECT_EQ(ranks.grad(0), 4 * 2.5) << "the other ranks send 2, 3 and 4 times as much";
}

TEST(Step, BucketsAreLaunchedInPlanOrder) {
  Ranks ranks;
  ranks.learn();
  Step step(*ranks.context);
  step.begin();
  ranks.arrive(step, 0, 4);
  EXPECT_TRUE(ranks.collective->all_reduces().empty()) << "param 2 comes first in the plan";
  ranks.arrive(step, 2, 8);
  EXPECT_EQ(ranks.collective->all_reduces().size(), 1u);
  ranks.arrive(step, 1, 12);
  EXPECT_EQ(ranks.collective->all_reduces().size(), kStepParams);
  step.finish();
  EXPECT_EQ(ranks.grad(1), 12 * 2.5);
  EXPECT_FALSE(step.error());
}

TEST(Step, AMissingGradientIsSentAsZeros) {
  Ranks ranks;
  ranks.learn();
  ranks.tensors[1].mutable_grad().reset();
  Step step(*ranks.context);
  step.begin();
  ranks.arrive(step, 0, 4);
  ranks.arrive(step, 2, 8);
  EXPECT_EQ(step.missing(), Indices{1});
  step.finish();
  EXPECT_EQ(ranks.grad(1), 0);
}

TEST(Step, TheGradientThatArrivedCounts) {
  for (const bool batched : {false, true}) {
    Ranks ranks({kOneBucket, GraphMode::kDefault, false, batched});
    ranks.learn();
    Step step(*ranks.context);
    step.begin();
    ranks.arrive(step, 0, 4);
    ranks.tensors[0].mutable_grad() = at::full({1}, 100, at::kDouble);
    ranks.arrive(step, 1, 4);
    ranks.arrive(step, 2, 4);
    step.finish();
    EXPECT_EQ(ranks.grad(0), 4 * 2.5) << batched;
  }
}

TEST(Step, ASecondArrivalIsReportedAtTheEnd) {
  Ranks ranks;
  ranks.learn();
  Step step(*ranks.context);
  step.begin();
  for (std::size_t i = 0; i < kStepParams; ++i) {
    ranks.arrive(step, i, 4);
  }
  ranks.arrive(step, 1, 4);
  step.finish();
  ASSERT_TRUE(step.error());
  expect_mentions(step.error()->what(), {"'w1'", "another gradient"});
}

// match_peers() completes the buckets of a first step that broke off. No gradient may follow.
TEST(Step, OneGradientTooManyIsABug) {
  Ranks ranks;
  Step step(*ranks.context);
  step.begin();
  for (std::size_t i = 0; i < kStepParams; ++i) {
    ranks.arrive(step, i, 4);
  }
  ASSERT_TRUE(step.match_peers());
  try {
    step.finish();
    FAIL() << "the buckets were launched twice";
  } catch (const InternalError& error) {
    expect_mentions(error.what(), {"bucket 2", "has all gradients", "one more"});
  }
  EXPECT_EQ(ranks.collective->all_reduces().size(), kStepParams);
}

TEST(EmptyStep, MakesTheSameCallsAndKeepsGrads) {
  Ranks ranks;
  ranks.learn();
  const auto before = ranks.grad(0);
  EXPECT_FALSE(EmptyStep(*ranks.context).run());
  EXPECT_EQ(ranks.collective->all_reduces().size(), kStepParams);
  EXPECT_EQ(ranks.grad(0), before);
  EXPECT_EQ(ranks.collective->all_reduces().front().tensor.item<double>(), 0);
}

TEST(Step, AStepThatBrokeOffAfterAllLaunchesMatchesPeers) {
  Ranks ranks;
  ranks.learn();
  const auto num_steps = ranks.context->progress.num_steps;
  {
    Step step(*ranks.context);
    step.begin();
    ranks.arrive(step, 2, 4);
    EXPECT_FALSE(step.match_peers()) << "peers wait for two buckets";
  }
  EXPECT_EQ(ranks.context->progress.num_steps, num_steps);
  Step step(*ranks.context);
  step.begin();
  for (std::size_t i = 0; i < kStepParams; ++i) {
    ranks.arrive(step, i, 4);
  }
  EXPECT_TRUE(step.match_peers());
  EXPECT_EQ(ranks.context->progress.num_steps, num_steps + 1);
}

TEST(Step, AFrozenParamIsSentAndNotWritten) {
  Ranks ranks;
  ranks.learn();
  ranks.tensors[1].set_requires_grad(false);
  ranks.tensors[1].mutable_grad() = at::full({1}, 8, at::kDouble);
  Step step(*ranks.context);
  step.begin();
  ranks.arrive(step, 2, 4);
  ranks.arrive(step, 0, 4);
  EXPECT_EQ(ranks.collective->all_reduces().size(), kStepParams);
  step.finish();
  EXPECT_EQ(ranks.grad(1), 8);
}

TEST(Step, WithoutOtherRanksNothingIsCopied) {
  Ranks ranks;
  ranks.collective = std::make_shared<FakeCollective>(0, 1);
  ranks.context->start_over(GraphMode::kDefault, ranks.collective, 0);
  ranks.learn();
  Step step(*ranks.context);
  step.begin();
  ranks.arrive(step, 0, 4);
  step.finish();
  EXPECT_EQ(ranks.grad(0), 4);
  EXPECT_EQ(ranks.context->buckets.size(), 0u);
  EXPECT_TRUE(ranks.collective->all_reduces().empty());
}

}  // namespace
}  // namespace ddpx
