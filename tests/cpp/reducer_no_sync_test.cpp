// Backwards whose forwards ran while synchronisation was off.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <optional>
#include <string>

#include "replica.h"

namespace ddpx {
namespace {

class ReducerNoSync : public testing::Test {
 protected:
  ReducerNoSync() {
    replica.learn();
  }

  at::Tensor local_forward() {
    replica.reducer->set_sync_enabled(false);
    auto loss = replica.forward({2, 1, 0});
    replica.reducer->set_sync_enabled(true);
    return loss;
  }

  std::size_t num_all_reduces() const {
    return replica.collective->all_reduces().size();
  }

  const Grads kLocalGrads = {12., 8., 6.};
  Replica replica;
};

TEST_F(ReducerNoSync, ABackwardOfALocalForwardIsLocal) {
  local_forward().backward();
  EXPECT_EQ(replica.grads(), kLocalGrads);
  EXPECT_EQ(num_all_reduces(), 0u);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST_F(ReducerNoSync, TheNextSynchronisedBackwardAveragesTheSum) {
  local_forward().backward();
  replica.step();
  EXPECT_EQ(replica.grads(), (Grads{60., 40., 30.}));
}

TEST_F(ReducerNoSync, APreparedBackwardAverages) {
  const auto loss = local_forward();
  replica.reducer->prepare_for_backward();
  loss.backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.clear_grads();
  local_forward().backward();
  EXPECT_EQ(replica.grads(), kLocalGrads) << "only one was prepared";
}

TEST_F(ReducerNoSync, GradientsThatCameBeforeASynchronisingOutputAreCounted) {
  replica.reducer->prepare_forward();
  const auto synchronising = replica.params[1].sum() * 8 + replica.params[0].sum() * 12;
  replica.reducer->watch_outputs({synchronising});
  replica.reducer->set_sync_enabled(false);
  const auto local = replica.params[2].sum() * 6;  // later, so that backward runs it first
  replica.reducer->watch_outputs({local});
  replica.reducer->set_sync_enabled(true);
  (synchronising + local).backward();
  EXPECT_EQ(replica.grads(), (Grads{30., 20., 15.}));
  EXPECT_EQ(num_all_reduces(), 3u);
}

TEST_F(ReducerNoSync, AGradientThatAutogradGradTakesIsAnErrorWhereOneWasPrepared) {
  const auto loss = local_forward() * 2;
  replica.reducer->prepare_for_backward();
  try {
    torch::autograd::grad({loss}, {replica.params[1]});
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"'w1'", "ScheduleInterleavedZeroBubble"});
  }
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST_F(ReducerNoSync, ABackwardForInputsIsNotTheOneThatWasPrepared) {
  const auto loss = local_forward();
  const auto input = at::ones({}, at::kDouble).set_requires_grad(true);
  replica.reducer->prepare_forward();
  const auto other = input * replica.params[0].sum();
  replica.reducer->watch_outputs({other});
  replica.reducer->prepare_for_backward();
  torch::autograd::backward({other}, {}, std::nullopt, false, {input});
  EXPECT_EQ(num_all_reduces(), 0u);
  loss.backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_F(ReducerNoSync, ResetForgetsThatABackwardWasPrepared) {
  replica.reducer->prepare_for_backward();
  replica.reducer->reset();
  local_forward().backward();
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

// In a join() context, for ranks that have run out of inputs.
class ReducerJoined : public ReducerNoSync {
 protected:
  std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(ReducerJoined, ALocalBackwardIsAnErrorWhereAnAverageWasAnnounced) {
  replica.reducer->join_announcement().announce(true);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer->set_sync_enabled(false);
  expect_mentions(error_of([&] { loss.backward(); }), {"join()", "backward runs inside"});
  replica.reducer->set_sync_enabled(true);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_F(ReducerJoined, AnAverageIsAnErrorWhereOnlyLocalStepsWereAnnounced) {
  replica.reducer->join_announcement().announce(false);
  const auto bypass = replica.params[0].sum();
  expect_mentions(error_of([&] { bypass.backward(); }), {"join()", "averages gradients"});
  EXPECT_EQ(num_all_reduces(), 0u);
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
}

TEST_F(ReducerJoined, AnAnnouncedAverageAllowsLocalStepsBesideIt) {
  replica.reducer->join_announcement().announce(true);
  const auto loss = replica.forward({2, 1, 0});
  replica.reducer->join_announcement().announce(false);
  local_forward().backward();
  const auto local = local_forward();
  replica.reducer->set_sync_enabled(false);
  local.backward();
  replica.reducer->set_sync_enabled(true);
  replica.clear_grads();
  loss.backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_F(ReducerJoined, PreparingNeedsAnAnnouncedAverage) {
  const auto prepare = [this] { replica.reducer->prepare_for_backward(); };
  replica.reducer->join_announcement().announce(false);
  expect_mentions(error_of(prepare), {"join()", "prepare_for_backward()"});
  replica.reducer->join_announcement().announce(true);
  EXPECT_EQ(error_of(prepare), "");
  replica.step();
  expect_mentions(error_of(prepare), {"join()"});
  replica.reducer->join_announcement().leave();
  EXPECT_EQ(error_of(prepare), "");
}

TEST_F(ReducerNoSync, AutogradGradOfALocalForwardIsLocal) {
  const auto grads = torch::autograd::grad({local_forward()}, {replica.params[1]});
  EXPECT_EQ(grads.front()[0].item<double>(), 8.);
  EXPECT_EQ(num_all_reduces(), 0u);
}

}  // namespace
}  // namespace ddpx
