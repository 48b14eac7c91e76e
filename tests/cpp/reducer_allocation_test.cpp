// Memory for buckets that are made again is refused: the reducer works as before, or tries again.
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

constexpr std::size_t kForever = std::numeric_limits<std::size_t>::max();

// After `num_before` allocations that succeed, the next `num_failing` fail.
void refuse_memory(
    FakeCollective& collective, std::size_t num_before, std::size_t num_failing = 1) {
  collective.on_allocate = [num_before, num_failing]() mutable {
    if (num_before > 0) {
      --num_before;
    } else if (num_failing > 0) {
      --num_failing;
      throw std::bad_alloc();
    }
  };
}

void grant_memory(FakeCollective& collective) {
  collective.on_allocate = [] {};
}

std::vector<Indices> members(const Reducer& reducer) {
  std::vector<Indices> buckets;
  const auto plan = reducer.state().plan();
  for (const auto& spec : plan.buckets()) {
    buckets.push_back(spec.param_indices);
  }
  return buckets;
}

std::size_t num_events(const Log& log, const std::string& event) {
  return static_cast<std::size_t>(std::count(log.begin(), log.end(), event));
}

class FirstHook final : public CommHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    ++num_calls;
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(bucket.getBufferRef());
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.toTensor();
  }

  int num_calls = 0;
};

struct RefusedAllocation {
  bool views;
  std::size_t num_before;  // allocations of the same call that succeed
};

class ReducerAllocation : public testing::TestWithParam<RefusedAllocation> {
 protected:
  ReducerAllocation() : replica(GraphMode::kDefault, kParamABucket, GetParam().views) {}

  // Makes the call, whose memory `collective` refuses. Nothing must change.
  void expect_refused(FakeCollective& collective, const std::function<void()>& call) {
    for (auto& param : replica.params) {
      param.mutable_grad() = at::full_like(param, 4.);
    }
    const auto before = members(*replica.reducer);
    std::vector<at::Tensor> grads;
    for (const auto& param : replica.params) {
      grads.push_back(param.grad());
    }
    refuse_memory(collective, GetParam().num_before);
    EXPECT_THROW(call(), std::bad_alloc);
    grant_memory(collective);
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    EXPECT_EQ(members(*replica.reducer), before);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      EXPECT_TRUE(replica.params[i].grad().is_same(grads[i]));
    }
    EXPECT_EQ(replica.grads(), (Grads{4., 4., 4.}));
  }

  void expect_means() {
    for (int step = 0; step < 3; ++step) {
      replica.clear_grads();
      replica.step({1, 0, 2});
      EXPECT_EQ(replica.grads(), kMeanGrads) << "step " << step;
    }
  }

  Replica replica;
};

TEST_P(ReducerAllocation, TheGraphIsNotMadeStatic) {
  expect_refused(*replica.collective, [&] { replica.reducer->set_static_graph(); });
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), (Grads{40., 30., 25.}));
  expect_means();
  EXPECT_NE(replica.failing_step({2, 0}).find("'w1'"), std::string::npos)
      << "a static graph might lack it";
}

TEST_P(ReducerAllocation, TheGraphIsMadeStaticAtTheSecondTry) {
  expect_refused(*replica.collective, [&] { replica.reducer->set_static_graph(); });
  replica.reducer->set_static_graph();
  EXPECT_EQ(replica.grads(), (Grads{4., 4., 4.}));
  expect_means();
}

TEST_P(ReducerAllocation, TheGroupStays) {
  replica.learn({1, 0, 2});
  const auto other = std::make_shared<FakeCollective>(0, 2);
  const auto num_steps = replica.reducer->state().num_steps();
  expect_refused(*other, [&] { replica.reducer->set_collective(other, 70); });
  EXPECT_EQ(replica.reducer->state().num_steps(), num_steps);
  EXPECT_EQ(replica.reducer->state().arrival_order(), (Indices{1, 0, 2}));
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), (Grads{40., 30., 25.}));
  expect_means();
  EXPECT_EQ(replica.collective->all_reduces().size(), 12u);
  EXPECT_TRUE(other->log.empty());

  replica.reducer->set_collective(other, 70);
  replica.clear_grads();
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), (Grads{18., 12., 9.})) << "2 ranks, of which one sends the double";
}

TEST_P(ReducerAllocation, TheHookIsNotThere) {
  const auto alone = std::make_shared<FakeCollective>(0, 1);
  const auto hook = std::make_shared<FirstHook>();
  replica.reducer->set_collective(alone);
  expect_refused(*alone, [&] { set_comm_hook(*replica.reducer, hook); });
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), (Grads{16., 12., 10.}));
  EXPECT_EQ(hook->num_calls, 0);

  set_comm_hook(*replica.reducer, hook);
  replica.clear_grads();
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), kLocalGrads);
  EXPECT_EQ(hook->num_calls, 3);
}

TEST_P(ReducerAllocation, MixedPrecisionIsNotThere) {
  const auto hook = std::make_shared<FirstHook>();
  const Precision in_float{std::nullopt, at::kFloat};
  expect_refused(
      *replica.collective, [&] { set_mixed_precision(*replica.reducer, in_float, hook); });
  expect_means();  // in rebuilt buckets
  EXPECT_EQ(hook->num_calls, 0);
  for (const auto& all_reduce : replica.collective->all_reduces()) {
    EXPECT_EQ(all_reduce.tensor.scalar_type(), at::kDouble);
  }

  set_mixed_precision(*replica.reducer, in_float, hook);
  replica.clear_grads();
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), kLocalGrads);
  EXPECT_EQ(hook->num_calls, 3);
}

TEST_P(ReducerAllocation, AnotherGroupMendsAStepThatFailed) {
  replica.step({1, 0, 2});
  refuse_memory(*replica.collective, GetParam().num_before, kForever);
  EXPECT_THROW(replica.reducer->prepare_forward(), std::bad_alloc);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kFailed);
  const auto other = std::make_shared<FakeCollective>(0, 2);
  replica.reducer->set_collective(other);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.clear_grads();
  replica.step({1, 0, 2});
  EXPECT_EQ(replica.grads(), (Grads{18., 12., 9.}));
}

TEST_P(ReducerAllocation, ARebuildIsMadeUpForWithoutThePeers) {
  for (const std::size_t num_failing : {std::size_t{1}, std::size_t{2}, kForever}) {
    Replica other(GraphMode::kDefault, kParamABucket, GetParam().views);
    other.step({1, 0, 2});
    refuse_memory(*other.collective, GetParam().num_before, num_failing);
    EXPECT_THROW(other.reducer->prepare_forward(), std::bad_alloc);
    if (num_failing == kForever) {
      EXPECT_EQ(other.reducer->state().phase(), Phase::kFailed);
      EXPECT_THROW(other.reducer->prepare_forward(), std::bad_alloc);
      EXPECT_EQ(other.reducer->state().phase(), Phase::kFailed);
      EXPECT_EQ(other.grads(), kMeanGrads);
    }
    grant_memory(*other.collective);
    EXPECT_FALSE(other.reducer->prepare_forward()) << "it is not due any more";
    EXPECT_EQ(other.reducer->state().phase(), Phase::kIdle);
    EXPECT_EQ(members(*other.reducer), (std::vector<Indices>{{1}, {0}, {2}}));
    EXPECT_EQ(num_events(other.collective->log, "broadcast"), 1u);
    EXPECT_EQ(other.grads(), kMeanGrads);
    for (int step = 0; step < 2; ++step) {
      other.clear_grads();
      other.step({1, 0, 2});
      EXPECT_EQ(other.grads(), kMeanGrads);
    }
    EXPECT_EQ(num_events(other.collective->log, "broadcast"), 1u);
  }
}

TEST_P(ReducerAllocation, ARebuildDropsTheOldBucketsFirst) {
  replica.step({1, 0, 2});
  const c10::weak_intrusive_ptr<c10::StorageImpl> old(
      replica.collective->all_reduces().front().tensor.storage().getWeakStorageImpl());
  replica.clear_grads();
  replica.collective->clear();
  EXPECT_FALSE(old.expired());
  bool dropped = false;
  replica.collective->on_allocate = [&] { dropped = old.expired(); };
  replica.reducer->prepare_forward();
  EXPECT_TRUE(dropped);
}

// A step breaks off, and there is no memory for new buckets; whatever is next tries again.
TEST_P(ReducerAllocation, EachNextUseTriesAgain) {
  const auto shadow = [](Replica& of) { of.reducer->shadow_step(); };
  const auto reset = [](Replica& of) { of.reducer->reset(); };
  const auto rebuild = [](Replica& of) { of.reducer->rebuild_buckets(); };
  const auto forward = [](Replica& of) { of.reducer->prepare_forward(); };
  const auto bypass = [](Replica& of) {
    (of.params[0].sum() * of.params[1].sum() * of.params[2].sum()).backward();
  };
  const auto local = [](Replica& of) {
    of.reducer->set_sync_enabled(false);
    of.params[0].sum().backward();
  };
  const auto manual = [](Replica& of) {
    of.reducer->set_manual_finalization(true);
    of.reducer->set_manual_finalization(false);
  };
  const auto plan = [](Replica& of) { of.reducer->use_buckets({{0}, {1}, {2}}); };
  const std::vector<std::function<void(Replica&)>> uses = {
      shadow, reset, rebuild, forward, bypass, local, manual, plan};
  for (const bool rebuilt : {false, true}) {
    for (std::size_t use = 0; use < uses.size(); ++use) {
      SCOPED_TRACE("use " + std::to_string(use) + (rebuilt ? ", rebuilt" : ""));
      Replica other(GraphMode::kDefault, kParamABucket, GetParam().views);
      if (rebuilt) {
        other.learn({1, 0, 2});
      }
      other.collective->on_launch = [](std::size_t) { throw std::runtime_error("aborted"); };
      refuse_memory(*other.collective, GetParam().num_before, kForever);
      EXPECT_THROW(other.step({1, 0, 2}), UserError);
      other.collective->on_launch = [](std::size_t) {};
      other.collective->clear();
      EXPECT_EQ(other.reducer->state().phase(), Phase::kFailed);
      refuse_memory(*other.collective, GetParam().num_before, kForever);
      EXPECT_THROW(uses[use](other), std::bad_alloc);
      EXPECT_EQ(other.reducer->state().phase(), Phase::kFailed);
      EXPECT_TRUE(other.collective->log.empty() || use >= 4);
      grant_memory(*other.collective);
      EXPECT_NO_THROW(uses[use](other));
      EXPECT_EQ(other.reducer->state().phase(), Phase::kIdle);
      other.reducer->set_sync_enabled(true);
      for (int step = 0; step < 2; ++step) {
        other.clear_grads();
        other.step({1, 0, 2});
        EXPECT_EQ(other.grads(), kMeanGrads);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    ReducerAllocation,
    testing::Values(
        RefusedAllocation{false, 0},
        RefusedAllocation{false, 1},
        RefusedAllocation{false, 2},
        RefusedAllocation{true, 0},
        RefusedAllocation{true, 1},
        RefusedAllocation{true, 2}),
    [](const auto& info) {
      return (info.param.views ? std::string("View") : std::string("Copy")) +
             std::to_string(info.param.num_before);
    });

}  // namespace
}  // namespace ddpx
