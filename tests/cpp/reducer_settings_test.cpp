// What can be set on a reducer, and what it tells of itself.
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "observe/step_clock.h"
#include "replica.h"

namespace ddpx {
namespace {

// With views or without.
class ReducerPacksTogether : public testing::TestWithParam<bool> {
 protected:
  static Replica batched(GraphMode mode, const BucketCaps& caps) {
    ReducerOptions options{caps, mode, /*gradient_as_bucket_view=*/GetParam()};
    options.batched_copy = true;
    return Replica(options);
  }
};

TEST_P(ReducerPacksTogether, GradientsAreMeansInEveryMode) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    for (const auto& caps : {kOneBucket, kParamABucket}) {
      auto replica = batched(mode, caps);
      for (int step = 0; step < 4; ++step) {
        replica.clear_grads();
        replica.step();
        EXPECT_EQ(replica.grads(), kMeanGrads) << mode_name(mode) << ", step " << step;
      }
      replica.step();
      EXPECT_EQ(replica.grads(), (Grads{105., 70., 52.5})) << "a kept gradient is added to";
    }
  }
}

TEST_P(ReducerPacksTogether, ParamsMayStayUnused) {
  auto replica = batched(GraphMode::kFindUnused, kOneBucket);
  for (const bool used : {false, false, true, false, true}) {
    replica.clear_grads();
    replica.step(used ? Indices{2, 1, 0} : Indices{2, 0});
    EXPECT_EQ(replica.grads(), used ? kMeanGrads : (Grads{10., std::nullopt, 5.}));
  }
}

TEST_P(ReducerPacksTogether, TheGradientThatArrivedCounts) {
  auto replica = batched(GraphMode::kDefault, kOneBucket);
  replica.learn();
  // When the hook of a later param runs, the bucket of the earlier one is not packed yet.
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    replica.params[2].mutable_grad() = at::full_like(replica.params[2], 1000.);
    replica.params[1].mutable_grad().reset();
  });
  replica.step();
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerPacksTogether, TheGradientThatArrivedCountsInTheFirstStep) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    for (const bool batched : {false, true}) {
      ReducerOptions options{kParamABucket, mode, /*gradient_as_bucket_view=*/GetParam()};
      options.batched_copy = batched;
      Replica replica(options);
      const auto key = replica.params[0].register_hook([&](at::Tensor) {
        replica.params[2].mutable_grad() = at::full_like(replica.params[2], 1000.);
        replica.params[1].mutable_grad().reset();
      });
      for (int step = 0; step < 2; ++step) {
        replica.step();
        EXPECT_EQ(replica.grads(), kMeanGrads) << mode_name(mode) << ", step " << step;
        replica.clear_grads();
      }
      replica.params[0].remove_hook(key);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Views, ReducerPacksTogether, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

TEST(ReducerSettings, TheDivisorMayBeAnother) {
  Replica replica;
  set_divisor(*replica.reducer, 1);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{120., 80., 60.}));
  replica.clear_grads();
  set_divisor(*replica.reducer, 2);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{60., 40., 30.}));
  replica.clear_grads();
  set_divisor(*replica.reducer, std::nullopt);
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerSettings, ADivisorThatIsSetWithinAStepIsForTheNext) {
  Replica replica;
  const auto key =
      replica.params[1].register_hook([&](at::Tensor) { set_divisor(*replica.reducer, 1); });
  replica.step();  // param 2 was packed before, the others are packed after
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.params[1].remove_hook(key);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{120., 80., 60.}));
}

TEST(ReducerSettings, AfterSyncIsCalledWhenGradientsAreThere) {
  Replica replica;
  int num_calls = 0;
  set_after_sync(*replica.reducer, [&] {
    ++num_calls;
    EXPECT_EQ(replica.grads(), kMeanGrads);
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  });
  replica.step();
  EXPECT_EQ(num_calls, 1);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(num_calls, 2);
  replica.reducer->set_sync_enabled(false);
  replica.step();
  EXPECT_EQ(num_calls, 2);
}

TEST(ReducerSettings, TheGraphMayBeMadeStaticBeforeTheFirstStep) {
  Replica replica;
  replica.reducer->set_static_graph();
  replica.step({2, 0});
  EXPECT_EQ(replica.grads(), (Grads{10., std::nullopt, 5.}));
  expect_mentions(replica.failing_step({2, 1, 0}), {"static_graph=True", "'w1'"});
  EXPECT_NO_THROW(replica.reducer->set_static_graph()) << "it is";
}

// Steps without inputs (join()) rebuild buckets, but teach nothing of the graph.
TEST(ReducerSettings, MixedPrecisionIsRefusedAtOnceWhileAStepEnds) {
  Replica replica;
  std::future<void> call;
  replica.collective->on_wait = [&](std::size_t index) {
    if (!call.valid()) {
      call = std::async(
          std::launch::async, [&] { set_mixed_precision(*replica.reducer, {}, nullptr); });
    }
    EXPECT_EQ(call.wait_for(std::chrono::seconds(5)), std::future_status::ready);
    replica.collective->complete(index);
  };
  replica.step();
  EXPECT_THROW(call.get(), UserError);
}

TEST(ReducerSettings, AGraphThatIsMadeStaticHasNoOrderOfArrivalYet) {
  Replica replica;
  replica.reducer->shadow_step();
  EXPECT_TRUE(replica.reducer->prepare_forward());
  EXPECT_EQ(replica.reducer->state().arrival_order().size(), Replica::kNumParams);
  replica.reducer->set_static_graph();
  EXPECT_TRUE(replica.reducer->state().arrival_order().empty());
}

TEST(ReducerSettings, NothingStartsOverInsideABackward) {
  const std::vector<std::function<void(Replica&)>> calls = {
      [](Replica& replica) { replica.reducer->reset(); },
      [](Replica& replica) { replica.reducer->set_collective(replica.collective); },
      [](Replica& replica) { replica.reducer->set_static_graph(); },
      [](Replica& replica) { replica.reducer->remove_hooks(); },
  };
  for (const auto& call : calls) {
    Replica replica;
    const auto loss = replica.forward({2, 1, 0});
    loss.register_hook([&](at::Tensor) { call(replica); });  // before the first gradient
    try {
      loss.backward();
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      expect_mentions(error.what(), {"while a backward runs"});
    }
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST(ReducerSettings, LaterItIsTooLateToMakeTheGraphStatic) {
  Replica replica;
  replica.step();
  try {
    replica.reducer->set_static_graph();
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"before training loop starts"});
  }
}

TEST(ReducerSettings, ItCannotBeResetInsideABackward) {
  Replica replica;
  const auto key = replica.params[1].register_hook([&](at::Tensor) { replica.reducer->reset(); });
  expect_mentions(replica.failing_step(), {"reset()", "while a backward runs"});
  replica.params[1].remove_hook(key);
  EXPECT_NO_THROW(replica.reducer->reset());
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerTells, WhetherTheGraphWasStatic) {
  Replica replica(GraphMode::kFindUnused);
  for (int step = 0; step < 2; ++step) {
    replica.step({2, 0});
    EXPECT_TRUE(replica.reducer->state().graph_was_static());
  }
  replica.step({2, 1, 0});
  EXPECT_FALSE(replica.reducer->state().graph_was_static());
}

TEST(ReducerTells, HowManyRanksUsedAParam) {
  Replica replica(GraphMode::kFindUnused);
  EXPECT_TRUE(replica.reducer->used_by_ranks().empty());
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own; };
  replica.step({2, 0});
  EXPECT_EQ(replica.reducer->used_by_ranks(), (std::vector<int32_t>{4, 0, 4}));
}

TEST(ReducerTells, NothingOfAForwardWhoseStepBrokeOff) {
  Replica replica;
  replica.learn();
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step(), std::domain_error);
  replica.params[0].remove_hook(key);
  // A forward that bypasses the wrapper.
  (replica.params[0].sum() * replica.params[1].sum() * replica.params[2].sum()).backward();
  EXPECT_EQ(replica.reducer->state().report().times.forward, 0);
  EXPECT_GT(replica.reducer->state().report().times.backward, 0);
}

TEST(ReducerTells, HowLongAStepTook) {
  Replica replica;
  EXPECT_EQ(replica.reducer->state().report().step, -1);
  replica.step();
  const auto first = replica.reducer->state().report();
  EXPECT_EQ(first.step, 0);
  EXPECT_EQ(first.num_launches, 3);
  EXPECT_EQ(first.times.overlap, 0) << "nothing leaves while it learns";
  replica.step();
  const auto second = replica.reducer->state().report();
  EXPECT_EQ(second.step, 1);
  EXPECT_EQ(second.num_launches, 3);
  EXPECT_GT(second.times.forward, 0);
  EXPECT_GT(second.times.backward, 0);
  EXPECT_GT(second.times.overlap, 0);
  EXPECT_GE(second.times.comm, second.times.overlap);
  EXPECT_EQ(second.mean.backward, (first.times.backward + second.times.backward) / 2);
}

}  // namespace
}  // namespace ddpx
