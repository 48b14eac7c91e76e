// Packing a bucket at once from the gradients that it holds.
#include "buckets/slot_io.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "fake_collective.h"

namespace ddpx {
namespace {

class PackTogether : public testing::TestWithParam<bool> {
 protected:
  static constexpr std::size_t kNumParams = 4;

  PackTogether() : collective(0, 3) {
    BucketSpec spec;
    for (std::size_t i = 0; i < kNumParams; ++i) {
      params.push_back(at::randn({3 + static_cast<int64_t>(i), 5}).set_requires_grad(true));
      spec.param_indices.push_back(i);
    }
    bucket = std::make_unique<Bucket>(spec, params, /*sparse=*/false, collective);
  }

  // The gradient of the param arrives.
  at::Tensor arrive(std::size_t i) {
    auto grad = at::randn_like(params[i].detach());
    params[i].mutable_grad() = grad;
    bucket->hold(i, grad);
    return grad;
  }

  const at::Tensor& view(std::size_t i) const {
    return bucket->slots()[i].view;
  }

  FakeCollective collective;
  std::vector<at::Tensor> params;
  std::unique_ptr<Bucket> bucket;
};

TEST_P(PackTogether, CopiesWhatArrivedUndivided) {
  const auto outside = arrive(0);
  view(1).fill_(7);
  params[1].mutable_grad() = view(1);
  bucket->hold(1, view(1));
  view(3).fill_(5);
  pack_together(*bucket, params, {false, false, false, true}, GetParam());
  EXPECT_TRUE(view(0).equal(outside));
  EXPECT_TRUE(view(1).eq(7).all().item<bool>()) << "lay in its slot";
  EXPECT_TRUE(view(2).eq(0).all().item<bool>()) << "has no gradient";
  EXPECT_TRUE(view(3).eq(5).all().item<bool>()) << "is left out";
  EXPECT_EQ(params[0].grad().is_alias_of(view(0)), GetParam());
}

TEST_P(PackTogether, AReplacedGradientStaysWithTheParam) {
  const auto arrived = arrive(0);
  const auto replacement = at::zeros_like(arrived);
  params[0].mutable_grad() = replacement;
  pack_together(*bucket, params, std::vector<bool>(kNumParams, false), GetParam());
  EXPECT_TRUE(view(0).equal(arrived));
  EXPECT_TRUE(params[0].grad().is_same(replacement));
}

TEST_P(PackTogether, NothingIsHeldAfterwards) {
  arrive(0);
  const std::vector<bool> none_left_out(kNumParams, false);
  pack_together(*bucket, params, none_left_out, GetParam());
  pack_together(*bucket, params, none_left_out, GetParam());
  EXPECT_TRUE(view(0).eq(0).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Views, PackTogether, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

}  // namespace
}  // namespace ddpx
