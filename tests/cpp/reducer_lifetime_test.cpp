// Who keeps a reducer alive, and what is left on the params when it is gone.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "replica.h"

namespace ddpx {
namespace {

bool has_post_hooks(const at::Tensor& param) {
  return !torch::autograd::impl::grad_accumulator(param)->post_hooks().empty();
}

TEST(ReducerLifetime, ADestroyedReducerLeavesNoHook) {
  Replica replica;
  const auto accumulator = torch::autograd::impl::grad_accumulator(replica.params[0]);
  EXPECT_EQ(accumulator->post_hooks().size(), 1u);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer.reset();
  for (const auto& param : replica.params) {
    EXPECT_FALSE(has_post_hooks(param));
  }
  loss.backward();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

TEST(ReducerLifetime, RemovedHooksAreGoneWhileItLives) {
  Replica replica;
  replica.reducer->remove_hooks();
  for (const auto& param : replica.params) {
    EXPECT_FALSE(has_post_hooks(param));
  }
  replica.params[0].sum().backward();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.reducer->phase(), Phase::kIdle);
}

TEST(ReducerLifetime, OthersHooksOnTheSameParamStay) {
  Replica replica;
  const auto options = ReducerOptions{kOneBucket, GraphMode::kDefault, false};
  const auto second = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto other = Reducer::create({{replica.params[0], "w0", false}}, options, second);
  replica.reducer.reset();
  replica.params[0].sum().backward();
  EXPECT_EQ(second->all_reduces().size(), 1u);
}

TEST(ReducerLifetime, NoGraphKeepsItAlive) {
  Replica replica;
  replica.step();
  const auto loss = replica.forward({2, 1, 0});
  const std::weak_ptr<Reducer> reducer = replica.reducer;
  replica.reducer.reset();
  EXPECT_TRUE(reducer.expired());
}

TEST(ReducerLifetime, ItMayBeDroppedInsideABackward) {
  Replica replica;
  replica.learn();
  replica.params[1].register_hook([&](at::Tensor) { replica.reducer.reset(); });
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.collective->log, (Log{"grad 2", "launch 0", "grad 1", "grad 0"}));
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

// The engine is walking the hooks of the accumulator whose hook drops the reducer.
TEST(ReducerLifetime, ItMayBeDroppedInsideItsOwnHook) {
  Replica replica;
  const auto options = ReducerOptions{kOneBucket, GraphMode::kDefault, false};
  const auto second = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto other = Reducer::create({{replica.params[2], "w2", false}}, options, second);
  replica.learn();
  second->clear();
  const auto collective = replica.collective;
  collective->on_launch = [&](std::size_t) { replica.reducer.reset(); };
  replica.forward({2, 1, 0}).backward();
  EXPECT_EQ(second->all_reduces().size(), 1u);
}

TEST(ReducerLifetime, HooksCannotBeRemovedInsideABackward) {
  Replica replica;
  replica.params[1].register_hook([&](at::Tensor) { replica.reducer->remove_hooks(); });
  expect_mentions(replica.failing_step({2, 1, 0}), {"cannot be removed while a backward runs"});
  EXPECT_EQ(replica.reducer->phase(), Phase::kIdle);
}

TEST(ReducerLifetime, GradientsInBucketsOutliveIt) {
  Replica replica(GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/true);
  replica.step();
  replica.reducer.reset();
  replica.collective->clear();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
