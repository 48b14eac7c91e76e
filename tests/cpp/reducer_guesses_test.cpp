// Params that no rank used a step ago are taken to be unused again; a second pass repairs that.
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "replica.h"

namespace ddpx {
namespace {

// What each all-reduce of the step was launched with.
struct Sent {
  explicit Sent(Replica& replica) {
    replica.collective->on_launch = [this, collective = replica.collective.get()](std::size_t i) {
      tensors.push_back(collective->all_reduces()[i].tensor.clone());
    };
  }

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> all;
    for (const auto& tensor : tensors) {
      all.push_back(tensor.numel());
    }
    return all;
  }

  std::vector<at::Tensor> tensors;
};

bool all_zero(const at::Tensor& tensor) {
  return tensor.equal(at::zeros_like(tensor));
}

class ReducerGuesses : public testing::TestWithParam<bool> {
 protected:
  static constexpr GraphMode kMode = GraphMode::kFindUnused;
  Replica replica{kMode, kParamABucket, /*gradient_as_bucket_view=*/GetParam()};
};

TEST_P(ReducerGuesses, ABucketDoesNotWaitForAParamThatWasUnused) {
  replica.learn({2, 0});
  const Sent sent(replica);
  replica.step({2, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "launch 0",
              "launch 1",
              "grad 0",
              "launch 2",
              "launch 3",
              "wait 0",
              "wait 1",
              "wait 2",
              "wait 3"}));
  EXPECT_TRUE(all_zero(sent.tensors[1]));
  EXPECT_EQ(replica.grads(), (Grads{10., std::nullopt, 5.}));
}

TEST_P(ReducerGuesses, AParamThatThisRankUsedAfterAllGetsItsMeanInASecondPass) {
  replica.learn({2, 0});
  const Sent sent(replica);
  replica.step({2, 1, 0});
  EXPECT_EQ(
      replica.collective->log,
      (
          Log{"grad 2",
              "launch 0",
              "launch 1",
              "grad 1",
              "grad 0",
              "launch 2",
              "launch 3",
              "wait 0",
              "wait 1",
              "wait 2",
              "wait 3",
              "launch 4",
              "wait 4"}));
  EXPECT_TRUE(all_zero(sent.tensors[1]));
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerGuesses, AWrongGuessIsNotMadeAgain) {
  replica.learn({2, 0});
  for (int step = 0; step < 3; ++step) {
    replica.clear_grads();
    const Sent sent(replica);
    replica.step({2, 1, 0});
    EXPECT_EQ(sent.tensors.size(), step == 0 ? 5u : 4u);
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST_P(ReducerGuesses, AParamThatOnlyPeersUsedGetsTheirMean) {
  replica.learn({2, 0});
  replica.collective->peer_sends = [&](const at::Tensor& own, int) {
    if (own.scalar_type() == at::kInt) {
      return at::ones_like(own);
    }
    // Peers made the same guess, so their first pass has zeros for w1.
    const bool first_pass = replica.collective->all_reduces().size() < 5;
    return own.numel() == 2 && first_pass ? at::zeros_like(own) : own + 4;
  };
  replica.step({2, 0});
  EXPECT_EQ(replica.grads(), (Grads{16., 12., 14.}));
  EXPECT_EQ(replica.reducer->used_by_ranks(), (std::vector<int32_t>{4, 3, 4}));
}

TEST_P(ReducerGuesses, AKeptGradientIsAveragedWithWhatCameToIt) {
  const auto multiples = replica.collective->peer_sends;
  replica.step({2, 1, 0});
  // A view takes part in the all-reduce: it comes back as it was, because ranks kept the same mean.
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own; };
  replica.step({2, 0});
  replica.collective->peer_sends = multiples;
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.grads()[1], 70.) << "2.5 times the sum of 20 and 8";
}

TEST_P(ReducerGuesses, AKeptGradientOfARightGuessStaysAsItIs) {
  replica.step({2, 1, 0});
  replica.collective->peer_sends = [](const at::Tensor& own, int) { return own; };
  for (int step = 0; step < 3; ++step) {
    replica.step({2, 0});
    EXPECT_EQ(replica.grads()[1], 20.);
  }
}

TEST_P(ReducerGuesses, ASecondPassHasOnlyTheWrongGuessesInIt) {
  Replica one_bucket(kMode, kOneBucket, /*gradient_as_bucket_view=*/GetParam());
  one_bucket.learn({2, 0});
  const Sent sent(one_bucket);
  one_bucket.step({2, 1, 0});
  ASSERT_EQ(sent.sizes(), (std::vector<int64_t>{6, 3, 6}));
  EXPECT_EQ(sent.tensors[0].count_nonzero().item<int64_t>(), 4);
  EXPECT_EQ(sent.tensors[2].count_nonzero().item<int64_t>(), 2);
  EXPECT_EQ(one_bucket.grads(), kMeanGrads);
}

TEST_P(ReducerGuesses, ABrokenStepTakesItsGuessesAlong) {
  replica.learn({2, 0});
  const auto key = replica.params[0].register_hook(
      [](at::Tensor) -> void { throw std::domain_error("raised by a tensor hook"); });
  EXPECT_THROW(replica.step({2, 0}), std::domain_error);
  replica.params[0].remove_hook(key);
  replica.clear_grads();
  replica.collective->clear();
  replica.step({2, 1, 0});
  EXPECT_EQ(replica.collective->all_reduces().size(), 4u);
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerGuesses, UnusedBucketsCanBeLeftOut) {
  ReducerOptions options{kParamABucket, kMode, /*gradient_as_bucket_view=*/GetParam()};
  options.skip_unused_buckets = true;
  Replica skipping(options);
  skipping.learn({2, 0});
  {
    const Sent sent(skipping);
    skipping.step({2, 0});
    EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 1, 3}));
    EXPECT_EQ(skipping.grads(), (Grads{10., std::nullopt, 5.}));
  }
  skipping.clear_grads();
  {
    const Sent sent(skipping);
    skipping.step({2, 1, 0});
    EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 1, 3, 2}));
    EXPECT_EQ(skipping.grads(), kMeanGrads);
  }
  skipping.clear_grads();
  const Sent sent(skipping);
  skipping.step({2, 1, 0});
  EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 2, 1, 3}));
  EXPECT_EQ(skipping.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(Views, ReducerGuesses, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

// ---- a rank without a step of its own ----------------------------------------------------------

class ReducerShadow : public testing::TestWithParam<GraphMode> {
 protected:
  std::vector<int64_t> sizes_of_a_step(bool with_used_map) const {
    return with_used_map ? std::vector<int64_t>{3, 2, 1, 3} : std::vector<int64_t>{3, 2, 1};
  }
  bool agrees_at_first() const {
    return GetParam() != GraphMode::kDefault;
  }

  Replica replica{GetParam(), kParamABucket};
};

TEST_P(ReducerShadow, MakesTheCallsOfAFirstStepWithZeros) {
  const Sent sent(replica);
  replica.reducer->shadow_step();
  EXPECT_EQ(sent.sizes(), sizes_of_a_step(agrees_at_first()));
  for (const auto& tensor : sent.tensors) {
    EXPECT_TRUE(all_zero(tensor));
  }
  EXPECT_EQ(replica.grads(), (Grads{std::nullopt, std::nullopt, std::nullopt}));
  EXPECT_EQ(replica.reducer->phase(), Phase::kIdle);
  EXPECT_EQ(replica.reducer->rebuild_buckets(), GetParam() != GraphMode::kFindUnused);
}

TEST_P(ReducerShadow, LeavesGradientsAlone) {
  replica.step();
  replica.reducer->prepare_forward();
  const Sent sent(replica);
  replica.reducer->shadow_step();
  EXPECT_EQ(sent.sizes(), sizes_of_a_step(GetParam() == GraphMode::kFindUnused));
  EXPECT_EQ(replica.grads(), kMeanGrads);
  replica.clear_grads();
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

TEST_P(ReducerShadow, AFailingCollectiveIsReported) {
  const auto succeed = replica.collective->on_wait;
  replica.collective->on_wait = [&](std::size_t index) {
    replica.collective->fail(index, "connection reset by peer");
  };
  EXPECT_THROW(replica.reducer->shadow_step(), UserError);
  EXPECT_EQ(replica.reducer->phase(), Phase::kIdle);
  replica.collective->on_wait = succeed;
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerShadow,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

TEST(ReducerShadowGuesses, TakesPartInTheSecondPassOfItsPeers) {
  Replica replica(GraphMode::kFindUnused, kParamABucket);
  replica.learn({2, 0});
  replica.collective->peer_sends = [](const at::Tensor& own, int) {
    return own.scalar_type() == at::kInt ? at::ones_like(own) : own;
  };
  const Sent sent(replica);
  replica.reducer->shadow_step();
  EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 2, 1, 3, 2}));
  EXPECT_TRUE(all_zero(sent.tensors.back()));
  EXPECT_EQ(replica.grads(), (Grads{std::nullopt, std::nullopt, std::nullopt}));
}

}  // namespace
}  // namespace ddpx
