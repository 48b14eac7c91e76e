// The plan changes after many steps, as the search of the best plan changes it.
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "errors.h"
#include "reducer/all_reduce_times.h"
#include "replica.h"

namespace ddpx {
namespace {

using Buckets = std::vector<Indices>;

Buckets buckets_of(const Reducer& reducer) {
  Buckets found;
  const auto plan = reducer.state().plan();
  for (const auto& spec : plan.buckets()) {
    found.push_back(spec.param_indices);
  }
  return found;
}

class ReducerUsesBuckets : public testing::TestWithParam<bool> {};

TEST_P(ReducerUsesBuckets, StepsGoOnWithTheNewPlan) {
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    Replica replica(mode, kParamABucket, /*gradient_as_bucket_view=*/GetParam());
    for (int step = 0; step < 4; ++step) {
      replica.clear_grads();
      replica.step();
    }
    for (const auto& plan : {Buckets{{2, 0}, {1}}, Buckets{{0, 1, 2}}, Buckets{{1}, {2}, {0}}}) {
      replica.reducer->prepare_forward();
      replica.reducer->use_buckets(plan);
      EXPECT_EQ(buckets_of(*replica.reducer), plan);
      replica.clear_grads();
      replica.step();
      EXPECT_EQ(replica.grads(), kMeanGrads);
      EXPECT_EQ(buckets_of(*replica.reducer), plan) << "the plan stays";
    }
  }
}

TEST_P(ReducerUsesBuckets, KeptGradientsStay) {
  Replica replica(GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/GetParam());
  replica.learn();
  replica.step();
  replica.reducer->use_buckets({{0, 1, 2}});
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{105., 70., 52.5})) << "a kept gradient is added to";
}

INSTANTIATE_TEST_SUITE_P(Views, ReducerUsesBuckets, testing::Bool());

TEST(ReducerPlan, AWrongPlanChangesNothing) {
  Replica replica;
  replica.learn();
  const auto before = buckets_of(*replica.reducer);
  EXPECT_THROW(replica.reducer->use_buckets({{0, 1}}), InternalError);
  EXPECT_EQ(buckets_of(*replica.reducer), before);
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerPlan, APlanIsRefusedWithinABackward) {
  Replica replica;
  replica.learn();
  replica.collective->on_launch = [&](std::size_t) {
    EXPECT_THROW(replica.reducer->use_buckets({{0, 1, 2}}), UserError);
  };
  replica.step();
}

TEST(ReducerPlan, APlanIsRefusedBeforeTheFirstGradientOfABackward) {
  Replica replica;
  replica.learn();
  replica.reducer->prepare_forward();
  const auto inner = replica.params[0].sum() * replica.params[1].sum() * replica.params[2].sum();
  bool refused = false;
  inner.register_hook([&](const at::Tensor&) {
    try {
      replica.reducer->use_buckets({{0, 1, 2}});
    } catch (const UserError&) {
      refused = true;
    }
  });
  const auto output = inner * 1;
  replica.reducer->watch_outputs({output});
  output.backward();
  EXPECT_TRUE(refused);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST(ReducerPlan, TimedAllReducesAreCollectiveCalls) {
  Replica replica;
  replica.learn();
  const auto times = time_all_reduces(*replica.reducer, /*num_bytes=*/4096, /*repeats=*/3);
  EXPECT_EQ(times.size(), 3U);
  ASSERT_EQ(replica.collective->all_reduces().size(), 3U);
  EXPECT_EQ(replica.collective->all_reduces()[0].tensor.nbytes(), 4096U);
}

}  // namespace
}  // namespace ddpx
