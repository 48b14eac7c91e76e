// The steps of a rank without gradients of its own.
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "replica.h"
#include "sent.h"

namespace ddpx {
namespace {

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
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  EXPECT_EQ(replica.reducer->rebuild_buckets(), GetParam() == GraphMode::kDefault);
}

TEST_P(ReducerShadow, RebuildsBucketsAtTheForwardAtWhichPeersDo) {
  Replica peer{GetParam(), kParamABucket};
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(replica.reducer->rebuild_buckets(), peer.reducer->rebuild_buckets()) << step;
    peer.step();
    replica.reducer->shadow_step();
  }
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
  EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
  replica.collective->on_wait = succeed;
  replica.step();
  EXPECT_EQ(replica.grads(), kMeanGrads);
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ReducerShadow,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic),
    [](const auto& info) { return mode_name(info.param); });

TEST(ReducerShadowSkips, TakesPartWherePeersUsedASkippedBucket) {
  ReducerOptions options{kParamABucket, GraphMode::kFindUnused, /*gradient_as_bucket_view=*/false};
  options.skip_unused_buckets = true;
  Replica replica(options);
  replica.learn({2, 0});
  replica.collective->peer_sends = [](const at::Tensor& own, int) {
    return own.scalar_type() == at::kInt ? at::ones_like(own) : own;
  };
  const Sent sent(replica);
  replica.reducer->shadow_step();
  EXPECT_EQ(sent.sizes(), (std::vector<int64_t>{3, 1, 3, 2}));
  EXPECT_TRUE(all_zero(sent.tensors.back()));
  EXPECT_EQ(replica.grads(), (Grads{std::nullopt, std::nullopt, std::nullopt}));
}

}  // namespace
}  // namespace ddpx
