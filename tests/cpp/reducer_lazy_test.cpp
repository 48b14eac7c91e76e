// Lazy buckets: memory from the first packed gradient to the end of the step.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "replica.h"

namespace ddpx {
namespace {

struct LazyMode {
  GraphMode mode;
  bool views;
};

ReducerOptions lazy_options(GraphMode mode, bool views) {
  ReducerOptions options{kParamABucket, mode, views};
  options.lazy_buckets = true;
  return options;
}

class ReducerLazy : public testing::TestWithParam<LazyMode> {
 protected:
  ReducerLazy() : replica(lazy_options(GetParam().mode, GetParam().views)) {}

  // No bucket has memory. Works hold what they summed, and views hold their bucket.
  void expect_no_memory() {
    replica.forget_calls();
    if (GetParam().views) {
      replica.clear_grads();
    }
    EXPECT_EQ(replica.collective->num_allocated(), 0u);
  }

  Replica replica;
};

TEST_P(ReducerLazy, BucketsHaveMemoryOnlyWithinAStep) {
  expect_no_memory();
  for (int step = 0; step < 4; ++step) {
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
    expect_no_memory();
    replica.reducer->prepare_forward();  // rebuilds buckets
    replica.reducer->used_by_ranks();
    expect_no_memory();
  }
}

TEST_P(ReducerLazy, ABucketIsAllocatedWithItsFirstGradient) {
  for (int step = 0; step < 3; ++step) {
    replica.step();
  }
  replica.reducer->prepare_forward();
  replica.clear_grads();
  replica.forget_calls();
  replica.collective->on_allocate = [this] { replica.collective->log.emplace_back("allocate"); };
  replica.step({2, 1, 0});
  Log log;
  for (const auto& event : replica.collective->log) {
    if (event.rfind("wait", 0) != 0) {
      log.push_back(event);
    }
  }
  Log expected;
  for (const auto* param : {"2", "1", "0"}) {
    expected.push_back(std::string("grad ") + param);
    expected.emplace_back("allocate");
    expected.push_back("launch " + std::to_string(expected.size() / 3));
  }
  if (GetParam().mode == GraphMode::kFindUnused) {
    expected.emplace_back("launch 3");
  }
  EXPECT_EQ(log, expected);
}

TEST_P(ReducerLazy, GradientsThatAddUpAreAveraged) {
  for (int step = 0; step < 3; ++step) {
    replica.clear_grads();
    replica.reducer->set_sync_enabled(false);
    replica.step();
    EXPECT_EQ(replica.grads(), kLocalGrads);
    replica.reducer->set_sync_enabled(true);
    replica.step();
    EXPECT_EQ(replica.grads(), (Grads{60., 40., 30.}));
    replica.forget_calls();
  }
}

TEST_P(ReducerLazy, MemoryThatIsRefusedWithinAStepBreaksThatStepOnly) {
  for (int step = 0; step < 3; ++step) {
    replica.step();
  }
  for (int num_before = 0; num_before < 3; ++num_before) {
    replica.clear_grads();
    replica.forget_calls();
    int num_left = num_before;
    replica.collective->on_allocate = [&num_left] {
      if (num_left-- == 0) {
        throw std::bad_alloc();
      }
    };
    EXPECT_THROW(replica.step(), std::bad_alloc);
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    replica.collective->on_allocate = [] {};
    expect_no_memory();
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST_P(ReducerLazy, AnAbortedStepReleasesItsMemory) {
  for (int step = 0; step < 3; ++step) {
    replica.step();
  }
  replica.clear_grads();
  const auto key = replica.params[1].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step({2, 1, 0}), std::domain_error);
  replica.params[1].remove_hook(key);
  replica.clear_grads();
  expect_no_memory();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerLazy, ARankWithoutInputsSendsZerosWithoutBuckets) {
  replica.step();
  replica.reducer->prepare_forward();
  replica.reducer->used_by_ranks();
  expect_no_memory();
  replica.reducer->shadow_step();
  expect_no_memory();
}

// In default mode and with a static graph, all ranks freeze the same params.
TEST_P(ReducerLazy, TheGradientOfAFrozenParamStaysWhereItIs) {
  if (GetParam().mode == GraphMode::kFindUnused) {
    GTEST_SKIP() << "peers may use the param";
  }
  replica.learn();
  replica.params[1].set_requires_grad(false);
  const auto grad = at::full({2}, 8., at::kDouble);
  replica.params[1].mutable_grad() = grad;
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{30., 8., 15.}));
  EXPECT_TRUE(replica.params[1].grad().is_same(grad));
}

TEST(ReducerLazyStatic, TheFirstStepAllocatesAtTheEndOfBackward) {
  Replica replica(lazy_options(GraphMode::kStatic, /*views=*/true));
  replica.collective->on_allocate = [&] { replica.collective->log.emplace_back("allocate"); };
  replica.step();
  const auto& log = replica.collective->log;
  EXPECT_EQ(Log(log.begin(), log.begin() + 4), (Log{"grad 2", "grad 1", "grad 0", "allocate"}));
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerLazy,
    testing::Values(
        LazyMode{GraphMode::kDefault, false},
        LazyMode{GraphMode::kDefault, true},
        LazyMode{GraphMode::kFindUnused, false},
        LazyMode{GraphMode::kFindUnused, true},
        LazyMode{GraphMode::kStatic, false},
        LazyMode{GraphMode::kStatic, true}),
    [](const auto& info) {
      return mode_name(info.param.mode) + (info.param.views ? "Views" : "");
    });

}  // namespace
}  // namespace ddpx
