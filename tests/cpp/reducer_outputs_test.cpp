// What watched outputs tell: where a backward starts, what it asks for, what is still to come.
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

const Grads kNoGrads = {std::nullopt, std::nullopt, std::nullopt};

at::Tensor leaf() {
  return at::ones({}, at::kDouble).set_requires_grad(true);
}

// A backward through an output of the wrapper that reaches none of its params.
void step_past_params(Replica& replica) {
  replica.reducer->prepare_forward();
  const auto output = leaf() * 1;
  replica.reducer->watch_outputs({output});
  output.backward();
}

TEST(ReducerOutputs, ALossThatReachesNoParamIsAStepWithNothingFromThisRank) {
  for (const auto mode : {GraphMode::kFindUnused, GraphMode::kStatic}) {
    Replica replica(mode);
    step_past_params(replica);
    EXPECT_EQ(replica.collective->all_reduces().size(), 4u) << mode_name(mode);
    EXPECT_EQ(replica.grads(), kNoGrads);
  }
}

TEST(ReducerOutputs, ALossThatReachesNoParamIsAnErrorInDefaultMode) {
  Replica replica;
  for (int step = 0; step < 2; ++step) {
    replica.learn();
    try {
      step_past_params(replica);
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      expect_mentions(error.what(), {"3 parameters got no gradient", "'w0', 'w1', 'w2'"});
    }
    EXPECT_EQ(replica.collective->all_reduces().size(), 3u) << "peers must not wait";
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  }
}

TEST(ReducerOutputs, WhereEveryParamIsFrozenThereIsNoStep) {
  Replica replica;
  for (auto& param : replica.params) {
    param.set_requires_grad(false);
  }
  step_past_params(replica);
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

TEST(ReducerOutputs, ABackwardWithoutSyncIsNoStep) {
  Replica replica;
  replica.reducer->set_sync_enabled(false);
  step_past_params(replica);
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

// Another output of the forward excuses a missing gradient. A backward that bypasses the wrapper
// has no such output.
TEST(ReducerOutputs, AnEarlierBackwardExcusesNoMissingGradientOfABypass) {
  Replica replica;
  replica.step();
  try {
    (replica.params[2].sum() * 6).backward();
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"2 parameters got no gradient", "'w0', 'w1'"});
  }
}

// ---- two outputs -------------------------------------------------------------------------------

class ReducerTwoOutputs : public testing::Test {
 protected:
  // w2 is behind the first output, w1 and w0 behind the second.
  void forward() {
    replica.reducer->prepare_forward();
    first = replica.params[2].sum() * 6;
    second = replica.params[1].sum() * 8 + replica.params[0].sum() * 12;
    replica.reducer->watch_outputs({first, second});
  }

  Replica replica;
  at::Tensor first;
  at::Tensor second;
};

TEST_F(ReducerTwoOutputs, EachMayBringItsPartInABackwardOfItsOwn) {
  for (int step = 0; step < 3; ++step) {
    replica.clear_grads();
    forward();
    EXPECT_NO_THROW(first.backward());
    EXPECT_EQ(replica.grads()[2], 15.);
    EXPECT_NO_THROW(second.backward());
    EXPECT_EQ(replica.grads()[1], 20.);
    EXPECT_EQ(replica.grads()[0], 30.);
    EXPECT_NO_THROW(replica.reducer->prepare_forward());
  }
}

TEST_F(ReducerTwoOutputs, TheNextForwardReportsWhatNeverCame) {
  forward();
  EXPECT_NO_THROW(first.backward());
  const auto error = replica.failing_step();
  expect_mentions(error, {"2 parameters got no gradient", "'w0', 'w1'"});
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

// What makes the last forward a thing of the past, so that nothing of it is reported any more.
TEST_F(ReducerTwoOutputs, NothingIsReportedOfAForwardThatIsOver) {
  const std::vector<std::function<void()>> ways = {
      [&] { replica.reducer->reset(); },
      [&] { replica.reducer->set_collective(replica.collective); },
      [&] { replica.reducer->remove_hooks(); },
  };
  for (const auto& end_forward : ways) {
    replica.clear_grads();
    forward();
    EXPECT_NO_THROW(first.backward());
    end_forward();
    EXPECT_NO_THROW(replica.reducer->prepare_forward());
  }
}

TEST_F(ReducerTwoOutputs, AResetBetweenTheirBackwardsChangesNothing) {
  forward();
  EXPECT_NO_THROW(first.backward());
  replica.reducer->reset();
  EXPECT_NO_THROW(second.backward());
  EXPECT_EQ(replica.grads()[1], 20.);
  EXPECT_EQ(replica.grads()[0], 30.);
  EXPECT_NO_THROW(replica.reducer->prepare_forward());
}

TEST_F(ReducerTwoOutputs, NothingIsToComeFromAnOutputThatIsGone) {
  forward();
  second.reset();
  try {
    first.backward();
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"2 parameters got no gradient", "'w0', 'w1'"});
  }
  replica.clear_grads();
  EXPECT_NO_THROW(replica.step());
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_F(ReducerTwoOutputs, BothAtOnceAreOneStep) {
  forward();
  (first + second).backward();
  EXPECT_EQ(replica.collective->all_reduces().size(), 3u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

// ---- autograd::grad() --------------------------------------------------------------------------

TEST(ReducerAutogradGrad, OfParamsIsLocalAndNoStep) {
  for (const bool first_step : {true, false}) {
    Replica replica;
    if (!first_step) {
      replica.learn();
    }
    const auto output = replica.forward({2, 1, 0});
    replica.collective->clear();
    const auto grads = torch::autograd::grad({output}, {replica.params[0]});
    EXPECT_EQ(grads.at(0).item<double>(), 12.);
    EXPECT_TRUE(replica.collective->all_reduces().empty());
    EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    EXPECT_EQ(replica.grads(), kNoGrads);
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST(ReducerAutogradGrad, OfParamsThatChangeAfterwardsIsAnErrorAtTheNextForward) {
  for (const bool first_step : {true, false}) {
    Replica replica;
    if (!first_step) {
      replica.learn();
    }
    const auto output = replica.forward({2, 1, 0});
    torch::autograd::grad({output}, {replica.params[0], replica.params[2]});
    for (auto& param : replica.params) {
      const at::NoGradGuard no_grad;
      param.mul_(1);
    }
    try {
      replica.reducer->prepare_forward();
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      expect_mentions(error.what(), {"torch.autograd.grad()", "('w0', 'w2')"});
    }
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST(ReducerAutogradGrad, AChangeBetweenTwoCallsIsAnError) {
  Replica replica;
  const auto output = replica.forward({2, 1, 0});
  const auto take = [&] {
    torch::autograd::grad({output}, {replica.params[0]}, {}, /*retain_graph=*/true);
  };
  take();
  {
    const at::NoGradGuard no_grad;
    replica.params[0].mul_(1);
  }
  take();
  EXPECT_THROW(replica.reducer->prepare_forward(), UserError);
}

// A change of `param.data` leaves the version of the param as it is.
TEST(ReducerAutogradGrad, AChangeOfOneElementWithoutAVersionIsAnError) {
  for (int64_t element = 0; element < 3; ++element) {
    Replica replica;
    const auto output = replica.forward({2, 1, 0});
    torch::autograd::grad({output}, {replica.params[2]});
    replica.params[2].variable_data()[element].zero_();
    EXPECT_THROW(replica.reducer->prepare_forward(), UserError) << "element " << element;
  }
}

TEST(ReducerAutogradGrad, OfParamsThatChangeInANewGroupIsNoError) {
  Replica replica;
  const auto output = replica.forward({2, 1, 0});
  torch::autograd::grad({output}, {replica.params[0]});
  replica.reducer->set_collective(replica.collective);
  {
    const at::NoGradGuard no_grad;
    replica.params[0].mul_(1);
  }
  EXPECT_NO_THROW(replica.reducer->prepare_forward());
}

TEST(ReducerAutogradGrad, WithoutSyncReturnsLocalGradients) {
  Replica replica;
  replica.reducer->set_sync_enabled(false);
  const auto grads = torch::autograd::grad({replica.forward({2, 1, 0})}, {replica.params[0]});
  EXPECT_EQ(grads.at(0).item<double>(), 12.);
}

TEST(ReducerAutogradGrad, OfOtherTensorsIsNoStep) {
  Replica replica;
  const auto input = leaf();
  replica.reducer->prepare_forward();
  const auto output = input * replica.params[0].sum();
  replica.reducer->watch_outputs({output});
  const auto grads = torch::autograd::grad({output}, {input});
  EXPECT_EQ(grads.at(0).item<double>(), 2.);
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_EQ(replica.grads(), kNoGrads);
}

// ---- params that hooks update within a backward -------------------------------------------------

// As an optimizer in register_post_accumulate_grad_hook().
struct Update final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& param) override {
    const at::NoGradGuard no_grad;
    at::Tensor(param).mul_(1);
  }
};

void update_early(const at::Tensor& param) {
  torch::autograd::impl::set_post_acc_grad_hooks(param, std::make_unique<Update>());
}

TEST(ReducerEarlyUpdates, AnUpdateBetweenTwoOutputsIsReported) {
  Replica replica;
  update_early(replica.params[2]);
  replica.reducer->prepare_forward();
  const auto second = replica.params[0].sum() * replica.params[1].sum() * 1;
  const auto first = replica.params[2].sum() * 1;  // newer nodes run first
  replica.reducer->watch_outputs({first, second});
  const auto error = error_of([&] { (first + second).backward(); });
  expect_mentions(error, {"1 parameter before the gradients were averaged", "w2"});
}

TEST(ReducerEarlyUpdates, AnAbortForgetsThem) {
  Replica replica;
  update_early(replica.params[2]);
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step(), std::domain_error);
  replica.params[0].remove_hook(key);
  replica.clear_grads();
  // No output of the wrapper tells that a backward begins.
  (replica.params[0].sum() * replica.params[1].sum() * replica.params[2].sum()).backward();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

}  // namespace
}  // namespace ddpx
