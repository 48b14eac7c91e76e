// Who keeps a reducer alive, and what is left on the params when it is gone.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../health/local_ranks.h"
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
  EXPECT_THROW(loss.backward(), UserError);  // the gradients would stay local
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

TEST(ReducerLifetime, RemovedHooksAreGoneWhileItLives) {
  Replica replica;
  replica.reducer->remove_hooks();
  for (const auto& param : replica.params) {
    EXPECT_FALSE(has_post_hooks(param));
  }
  replica.params[0].sum().backward();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST(ReducerLifetime, OthersHooksOnTheSameParamStay) {
  Replica replica;
  const auto options = ReducerOptions{kOneBucket, GraphMode::kDefault, false};
  const auto second = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto other = Reducer::create({{replica.params[0], "w0", false}}, options, second);
  other->prepare_forward();
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
  expect_mentions(replica.failing_step({2, 1, 0}), {"was deleted before this backward had ended"});
  EXPECT_EQ(replica.collective->log, (Log{"grad 2", "launch 0", "grad 1", "grad 0"}));
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

// The engine is walking the hooks of the accumulator whose hook drops the reducer.
TEST(ReducerLifetime, ItMayBeDroppedInsideItsOwnHook) {
  Replica replica;
  replica.learn();
  const auto options = ReducerOptions{kOneBucket, GraphMode::kDefault, false};
  const auto second = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
  const auto other = Reducer::create({{replica.params[2], "w2", false}}, options, second);
  other->prepare_forward();
  const auto collective = replica.collective;
  collective->on_launch = [&](std::size_t) { replica.reducer.reset(); };
  EXPECT_THROW(replica.forward({2, 1, 0}).backward(), UserError);
  EXPECT_EQ(second->all_reduces().size(), 1u);
}

TEST(ReducerLifetime, HooksCannotBeRemovedInsideABackward) {
  Replica replica;
  replica.params[1].register_hook([&](at::Tensor) { replica.reducer->remove_hooks(); });
  expect_mentions(replica.failing_step({2, 1, 0}), {"cannot be removed while a backward runs"});
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

// Python objects that a reducer owns need the GIL when they are destroyed. The watchdog must not
// wait for the GIL, which its caller may hold, and which is gone at the exit of the interpreter.
TEST(ReducerLifetime, TheWatchdogNeverDestroysIt) {
  const auto watch = health::watch(
      health::group_of(0, Replica::kWorldSize),
      health::access_to(std::make_shared<health::FakeStore>()));
  std::atomic<int> num_answers{0};
  std::atomic<bool> done{false};
  std::thread watchdog([&] {
    const health::Activity late{health::Doing::kBackward, health::kNotNumbered};
    while (!done) {
      num_answers += watch->peers().names().describe_missing(late).empty() ? 0 : 1;
    }
  });
  const auto owner = std::this_thread::get_id();
  std::atomic<int> num_elsewhere{0};
  for (int i = 0; i < 20; ++i) {
    std::vector<ReducerParam> params;  // so many that the watchdog is nearly always inside
    for (int number = 0; number < 1000; ++number) {
      const auto tensor = at::ones({}, at::kDouble).set_requires_grad(true);
      params.push_back({tensor, "a parameter with number " + std::to_string(number), false});
    }
    const auto collective = std::make_shared<FakeCollective>(0, Replica::kWorldSize);
    auto reducer = Reducer::create(
        params, ReducerOptions{kOneBucket, GraphMode::kDefault, false}, collective, {}, watch);
    // A member of the reducer: destroyed by the thread that destroys the reducer.
    const auto drop = [&](const int* number) {
      num_elsewhere += std::this_thread::get_id() == owner ? 0 : 1;
      delete number;
    };
    set_after_sync(*reducer, [member = std::shared_ptr<int>(new int(0), drop)] {});
    params[1].tensor.register_hook([&](at::Tensor) {  // the other gradient has come
      const int before = num_answers;
      EXPECT_TRUE(health::eventually([&] { return num_answers > before; }));
      reducer.reset();
    });
    EXPECT_THROW((params[0].tensor + params[1].tensor * 2).backward(), UserError);
    EXPECT_FALSE(reducer);
  }
  done = true;
  watchdog.join();
  EXPECT_EQ(num_elsewhere, 0);
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
