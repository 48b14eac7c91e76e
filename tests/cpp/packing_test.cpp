// Packing gradients into a bucket, and what becomes of `param.grad`.
#include "buckets/packing.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "fake_collective.h"

namespace ddpx {
namespace {

constexpr std::size_t kPackedParams = 4;

// A dense bucket of four params; three ranks, so that a product with 1/3 is not a quotient by 3.
struct DenseBucket {
  DenseBucket() : collective(0, 3) {
    BucketSpec spec;
    for (std::size_t i = 0; i < kPackedParams; ++i) {
      params.push_back(at::randn({3 + static_cast<int64_t>(i), 5}).set_requires_grad(true));
      spec.param_indices.push_back(i);
    }
    bucket = std::make_unique<Bucket>(spec, params, /*sparse=*/false, collective);
  }

  at::Tensor arrive(std::size_t i) {
    auto grad = at::randn_like(params[i].detach());
    params[i].mutable_grad() = grad;
    return grad;
  }

  const Slot& slot(std::size_t i) const {
    return bucket->slots()[i];
  }
  const at::Tensor& view(std::size_t i) const {
    return slot(i).view;
  }

  FakeCollective collective;
  std::vector<at::Tensor> params;
  std::unique_ptr<Bucket> bucket;
};

class Pack : public testing::TestWithParam<GradPlace>, public DenseBucket {};

TEST_P(Pack, CopiesTheProductWithTheReciprocal) {
  const auto grad = arrive(0);
  const auto value = grad.clone();
  pack(*bucket, slot(0), params[0], grad, 3, GetParam());
  EXPECT_TRUE(view(0).equal(value * (1.0 / 3)));
  const bool in_slot = GetParam() == GradPlace::kInSlot || GetParam() == GradPlace::kMovedIn;
  EXPECT_EQ(params[0].grad().is_alias_of(view(0)), in_slot);
  EXPECT_TRUE(grad.equal(value));
}

TEST_P(Pack, AGradientThatLiesInTheSlotIsDividedUnlessItMoves) {
  view(0).fill_(5);
  params[0].mutable_grad() = at::alias(view(0));
  pack(*bucket, slot(0), params[0], params[0].grad(), 3, GetParam());
  const auto value = at::full_like(view(0), 5);
  if (GetParam() == GradPlace::kMovedOut || GetParam() == GradPlace::kMovedIn) {
    EXPECT_TRUE(view(0).equal(value * (1.0 / 3)));
  } else {
    EXPECT_TRUE(view(0).equal(value / 3));
  }
  EXPECT_EQ(params[0].grad().equal(value), GetParam() == GradPlace::kMovedOut);
  EXPECT_EQ(params[0].grad().is_alias_of(view(0)), GetParam() != GradPlace::kMovedOut);
}

TEST_P(Pack, NoGradientLeavesZeros) {
  view(0).fill_(5);
  params[0].mutable_grad() = at::alias(view(0));
  pack(*bucket, slot(0), params[0], {}, 3, GetParam());
  EXPECT_TRUE(view(0).eq(0).all().item<bool>());
  const bool kept = params[0].grad().eq(5).all().item<bool>();
  EXPECT_EQ(kept, GetParam() == GradPlace::kMovedOut);
}

TEST_P(Pack, AReplacedGradientStaysWithTheParam) {
  const auto arrived = arrive(0);
  const auto replacement = at::zeros_like(arrived);
  params[0].mutable_grad() = replacement;
  pack(*bucket, slot(0), params[0], arrived, 1, GetParam());
  EXPECT_TRUE(view(0).equal(arrived));
  EXPECT_TRUE(params[0].grad().is_same(replacement));
}

INSTANTIATE_TEST_SUITE_P(
    Places,
    Pack,
    testing::Values(
        GradPlace::kOwnMemory, GradPlace::kInSlot, GradPlace::kMovedIn, GradPlace::kMovedOut),
    [](const auto& info) {
      return info.param == GradPlace::kOwnMemory ? "OwnMemory"
             : info.param == GradPlace::kInSlot  ? "InSlot"
             : info.param == GradPlace::kMovedIn ? "MovedIn"
                                                 : "MovedOut";
    });

class PackAll : public testing::TestWithParam<GradPlace>, public DenseBucket {
 protected:
  at::Tensor keep(std::size_t i) {
    grads[i] = arrive(i);
    return *grads[i];
  }

  std::vector<std::optional<at::Tensor>> grads =  // per slot
      std::vector<std::optional<at::Tensor>>(kPackedParams, at::Tensor());
};

TEST_P(PackAll, CopiesWhatArrivedUndivided) {
  const auto outside = keep(0);
  view(1).fill_(7);
  params[1].mutable_grad() = view(1);
  grads[1] = view(1);
  view(3).fill_(5);
  grads[3] = std::nullopt;
  pack_all(*bucket, params, grads, /*divisor=*/1, GetParam());
  EXPECT_TRUE(view(0).equal(outside));
  EXPECT_TRUE(view(1).eq(7).all().item<bool>()) << "lay in its slot";
  EXPECT_TRUE(view(2).eq(0).all().item<bool>()) << "has no gradient";
  EXPECT_TRUE(view(3).eq(5).all().item<bool>()) << "is excluded";
  EXPECT_EQ(params[0].grad().is_alias_of(view(0)), GetParam() == GradPlace::kInSlot);
}

TEST_P(PackAll, AReplacedGradientStaysWithTheParam) {
  const auto arrived = keep(0);
  const auto replacement = at::zeros_like(arrived);
  params[0].mutable_grad() = replacement;
  pack_all(*bucket, params, grads, /*divisor=*/1, GetParam());
  EXPECT_TRUE(view(0).equal(arrived));
  EXPECT_TRUE(params[0].grad().is_same(replacement));
}

INSTANTIATE_TEST_SUITE_P(
    Places,
    PackAll,
    testing::Values(GradPlace::kOwnMemory, GradPlace::kInSlot),
    [](const auto& info) { return info.param == GradPlace::kInSlot ? "InSlot" : "OwnMemory"; });

}  // namespace
}  // namespace ddpx
