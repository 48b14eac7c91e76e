// Whatever goes wrong in a step, the error says what, and the next step works.
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

// The reducer is idle and a fresh step comes out right.
void expect_reusable(Replica& replica) {
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  for (int step = 0; step < 2; ++step) {
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

struct StepKind {
  GraphMode mode;
  bool first_step;  // nothing leaves before the end of its backward
};

class ReducerFailure : public testing::TestWithParam<StepKind> {
 protected:
  void SetUp() override {
    if (!GetParam().first_step) {
      replica.learn();
    }
  }

  Replica replica{GetParam().mode};
};

TEST_P(ReducerFailure, AFailingCollectiveIsReportedWithRankBucketAndParams) {
  const auto succeed = replica.collective->on_wait;
  replica.collective->on_wait = [&](std::size_t index) {
    if (index == 1) {
      replica.collective->fail(index, "connection reset by peer");
    } else {
      replica.collective->complete(index);
    }
  };
  const auto error = replica.failing_step();
  expect_mentions(
      error, {"rank 0", "phase end of backward", "bucket 1", "('w1')", "connection reset by peer"});
  replica.collective->on_wait = succeed;
  replica.collective->clear();
  expect_reusable(replica);
}

TEST_P(ReducerFailure, AStepThatCannotBeginWhereBackwardEnds) {
  // The loss reaches no param, so that the step begins when backward ends. The frozen param's
  // bucket leaves first.
  const std::size_t first = replica.reducer->state().plan().buckets().front().param_indices.front();
  replica.params[first].set_requires_grad(false);
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  replica.reducer->prepare_forward();
  const auto output = input * 2;
  replica.reducer->watch_outputs({output});
  replica.collective->on_launch = [](std::size_t) {
    throw std::runtime_error("communicator was aborted");
  };
  EXPECT_THROW(output.backward(), UserError);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.collective->on_launch = [](std::size_t) {};
  replica.params[first].set_requires_grad(true);
  replica.collective->clear();
  expect_reusable(replica);
}

TEST_P(ReducerFailure, NothingIsWaitedForWhereAGraphTaskIsDestroyed) {
  set_check_finite(*replica.reducer, true);
  auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  // Raises when every gradient has arrived: peers finish the step.
  const auto key = input.register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  const auto run = [&] { replica.forward({2, 1, 0}, input).backward(); };
  for (int step = 0; step < 2; ++step) {
    replica.collective->clear();
    EXPECT_THROW(run(), std::domain_error);
    for (const auto& event : replica.collective->log) {
      EXPECT_EQ(event.rfind("wait", 0), std::string::npos) << event;
    }
  }
  input.remove_hook(key);
  set_check_finite(*replica.reducer, false);
  expect_reusable(replica);
}

// After a step that aborts at its end, this rank knows what its peers have learned from the step.
class ReducerLateAbort : public testing::Test {
 protected:
  // All gradients arrive before the error.
  void abort(Replica& replica, const Indices& arrival_order) {
    const auto key = input.register_hook(
        [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
    EXPECT_THROW(replica.forward(arrival_order, input).backward(), std::domain_error);
    input.remove_hook(key);
    replica.clear_grads();
  }

  at::Tensor input = at::ones({}, at::kDouble).set_requires_grad(true);
};

TEST_F(ReducerLateAbort, TheBucketsAreRebuiltNext) {
  Replica replica;
  abort(replica, {1, 0, 2});
  EXPECT_TRUE(replica.reducer->prepare_forward());
  EXPECT_EQ(replica.reducer->state().arrival_order(), (Indices{1, 0, 2}));
}

TEST_F(ReducerLateAbort, AnUnusedBucketIsLeftOutNext) {
  ReducerOptions options{kParamABucket, GraphMode::kFindUnused, false};
  options.skip_unused_buckets = true;
  Replica replica(options);
  replica.learn();
  abort(replica, {2, 0});
  replica.forget_calls();
  replica.step({2, 0});
  EXPECT_EQ(replica.collective->all_reduces().size(), 3u) << "2 buckets and the used-map";
}

// The used-map of the step before the abort is unread.
TEST_F(ReducerLateAbort, NoUsedMapIsWaitedFor) {
  Replica replica(GraphMode::kFindUnused);
  replica.learn();
  replica.step();
  replica.collective->log.clear();
  abort(replica, {2, 1, 0});
  for (const auto& event : replica.collective->log) {
    EXPECT_EQ(event.rfind("wait", 0), std::string::npos) << event;
  }
}

TEST_P(ReducerFailure, OtherThreadsMayLookWhileItWaits) {
  const auto succeed = replica.collective->on_wait;
  int num_looks = 0;
  replica.collective->on_wait = [&](std::size_t index) {
    auto look = std::async(std::launch::async, [&] { return replica.reducer->state().phase(); });
    ASSERT_EQ(look.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    EXPECT_EQ(look.get(), Phase::kFinalizing);
    ++num_looks;
    succeed(index);
  };
  replica.step();
  EXPECT_GE(num_looks, 3);
  replica.collective->on_wait = succeed;
}

TEST_P(ReducerFailure, AForwardOnAnotherThreadIsNoErrorWithinABackward) {
  std::future<bool> call;
  const auto key = replica.params[0].register_hook([&](at::Tensor) {
    call = std::async(std::launch::async, [&] { return replica.reducer->prepare_forward(); });
    ASSERT_EQ(call.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  });
  replica.step();
  replica.params[0].remove_hook(key);
  EXPECT_FALSE(call.get());
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerFailure, ACollectiveThatIsNeverDoneFailsInsteadOfHanging) {
  const auto succeed = replica.collective->on_wait;
  replica.collective->on_wait = [](std::size_t) {};
  expect_mentions(replica.failing_step(), {"bucket 0", "('w2')", "never completes"});
  replica.collective->on_wait = succeed;
  expect_reusable(replica);
}

TEST_P(ReducerFailure, ACollectiveThatCannotBeLaunched) {
  replica.collective->on_launch = [](std::size_t index) {
    if (index == 1) {
      throw std::runtime_error("communicator was aborted");
    }
  };
  expect_mentions(
      replica.failing_step(), {"rank 0", "bucket 1", "('w1')", "communicator was aborted"});
  replica.collective->on_launch = [](std::size_t) {};
  expect_reusable(replica);
}

TEST_P(ReducerFailure, AnExceptionInsideBackwardReachesTheCaller) {
  const auto key = replica.params[1].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step(), std::domain_error);
  replica.params[1].remove_hook(key);
  expect_reusable(replica);
}

TEST_P(ReducerFailure, CollectivesOfABrokenStepMayStillCompleteLater) {
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step(), std::domain_error);
  replica.params[0].remove_hook(key);
  EXPECT_EQ(replica.collective->all_reduces().size(), GetParam().first_step ? 0u : 2u);
  const auto abandoned = replica.collective->all_reduces();
  replica.collective->clear();
  replica.clear_grads();
  // Late enough to spoil what the next step has packed, if that lay in the same memory.
  replica.collective->on_wait = [&](std::size_t index) {
    for (const auto& all_reduce : abandoned) {
      all_reduce.tensor.fill_(-1);
      all_reduce.work->complete();
    }
    replica.collective->complete(index);
  };
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

std::vector<StepKind> all_step_kinds() {
  std::vector<StepKind> all;
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    all.push_back({mode, /*first_step=*/true});
    all.push_back({mode, /*first_step=*/false});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    StepKinds, ReducerFailure, testing::ValuesIn(all_step_kinds()), [](const auto& info) {
      return mode_name(info.param.mode) + (info.param.first_step ? "FirstStep" : "LaterStep");
    });

class ReducerUsedMapFailure : public testing::Test {
 protected:
  // The used-map of the first step fails; its buckets are all-reduces 0 to 2.
  void SetUp() override {
    replica.collective->on_wait = [this](std::size_t index) {
      if (index == 3) {
        replica.collective->fail(index, "connection reset by peer");
      } else {
        replica.collective->complete(index);
      }
    };
  }

  void expect_failure(const Indices& arrival_order) {
    expect_mentions(
        replica.failing_step(arrival_order),
        {"rank 0", "the all-reduce of the map of used parameters", "connection reset by peer"});
    expect_reusable(replica);
  }

  Replica replica{GraphMode::kFindUnused};
};

TEST_F(ReducerUsedMapFailure, SurfacesInItsStepIfTheAnswerIsNeeded) {
  expect_failure({2, 0});
}

TEST_F(ReducerUsedMapFailure, SurfacesInTheNextStepIfEveryParamWasUsed) {
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.grads(), kMeanGrads);
  expect_failure({2, 1, 0});
}

TEST(ReducerRebuildFailure, LeavesTheOldPlanAndIsTriedAgain) {
  Replica replica(GraphMode::kDefault, BucketCaps{0, 0, {}});
  replica.step();
  replica.collective->on_broadcast = [](const at::Tensor&) {
    throw std::runtime_error("connection reset by peer");
  };
  EXPECT_THROW(replica.reducer->prepare_forward(), UserError);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_EQ(replica.reducer->state().plan().buckets().size(), 1u);
  replica.collective->on_broadcast = [](const at::Tensor&) {};
  expect_reusable(replica);
  EXPECT_EQ(replica.reducer->state().plan().buckets().size(), 3u);
}

TEST(ReducerMissing, DefaultModeNamesTheParamOnceEveryBucketIsReduced) {
  Replica replica;
  replica.learn();
  const auto error = replica.failing_step({2, 0});
  expect_mentions(error, {"rank 0", "1 parameter got no gradient", "'w1'"});
  EXPECT_EQ(error.find("'w0'"), std::string::npos) << error;
  EXPECT_EQ(
      replica.collective->log,
      (Log{"grad 2", "launch 0", "grad 0", "launch 1", "launch 2", "wait 0", "wait 1", "wait 2"}));
  EXPECT_EQ(replica.grads(), (Grads{10., 0., 5.})) << "zeros were sent for w1";
  expect_reusable(replica);
}

TEST(ReducerMissing, AStaticGraphMustNotChange) {
  Replica replica(GraphMode::kStatic);
  replica.step();
  replica.clear_grads();
  const auto error = replica.failing_step({2, 0});
  expect_mentions(error, {"rank 0", "static_graph=True", "'w1'"});
  expect_reusable(replica);
}

TEST(ReducerMissing, TheFirstStepMayBeTheOne) {
  Replica replica;
  const auto error = replica.failing_step({2, 0});
  expect_mentions(error, {"1 parameter got no gradient", "'w1'"});
  EXPECT_EQ(
      replica.collective->log,
      (Log{"grad 2", "grad 0", "launch 0", "launch 1", "launch 2", "wait 0", "wait 1", "wait 2"}));
  EXPECT_EQ(replica.grads(), (Grads{10., 0., 5.}));
  expect_reusable(replica);
}

// Peers wait for its bucket, so zeros leave; their sum is not for this rank.
TEST(ReducerMismatch, ASparseGradientThatWasNotExpectedIsReportedAtTheEnd) {
  const auto weight = at::ones({4, 2}, at::kDouble).set_requires_grad(true);
  const auto bias = at::ones({2}, at::kDouble).set_requires_grad(true);
  const auto collective = std::make_shared<FakeCollective>(2, Replica::kWorldSize);
  collective->peer_sends = [](const at::Tensor& own, int) { return at::ones_like(own); };
  const auto reducer = Reducer::create(
      {{weight, "embedding.weight", false}, {bias, "bias", false}},
      ReducerOptions{BucketCaps{0, 0, {0}}, GraphMode::kDefault, false},
      collective);
  reducer->prepare_forward();
  const auto rows = at::zeros({1}, at::kLong);
  for (int step = 0; step < 2; ++step) {
    bias.mutable_grad().reset();
    weight.mutable_grad().reset();
    collective->clear();
    try {
      (at::embedding(weight, rows, -1, false, /*sparse=*/true) + bias).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      expect_mentions(
          error.what(), {"rank 2", "'embedding.weight'", "a sparse", "a dense", "[4, 2]"});
    }
    EXPECT_EQ(reducer->state().phase(), Phase::kIdle);
    ASSERT_EQ(collective->all_reduces().size(), 2u);
    EXPECT_TRUE(collective->all_reduces()[1].tensor.equal(at::full({8}, 3., at::kDouble)))
        << "zeros from this rank, ones from 3 peers";
    ASSERT_TRUE(weight.grad().is_sparse()) << "left alone";
    EXPECT_EQ(weight.grad().to_dense().sum().item<double>(), 2.);
    // A quarter of this rank's gradient, and 1 from each peer.
    EXPECT_TRUE(bias.grad().equal(at::full({2}, 3.25, at::kDouble))) << bias.grad();
  }
}

// A static graph launches buckets of unused params as the step begins, and outputs are not watched
// where the wrapper was bypassed: nothing else has joined the backward by then.
TEST(ReducerStaticFailure, ALaunchThatFailsAsTheStepBegins) {
  Replica replica(GraphMode::kStatic);
  const auto bypass = [&] { (replica.params[0].sum() * replica.params[1].sum()).backward(); };
  replica.step({1, 0});
  replica.collective->on_launch = [](std::size_t) { throw std::runtime_error("aborted"); };
  EXPECT_THROW(bypass(), UserError);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.collective->on_launch = [](std::size_t) {};
  EXPECT_NO_THROW(bypass());
}

}  // namespace
}  // namespace ddpx
