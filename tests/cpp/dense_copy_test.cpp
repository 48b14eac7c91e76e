// The loops against at::mul_out, which DDP packs with, and copy_, to the bit.
#include "buckets/dense_copy.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <gtest/gtest.h>

namespace ddpx {
namespace {

class DenseCopy : public testing::TestWithParam<at::ScalarType> {};

at::Tensor product(const at::Tensor& grad, double factor) {
  auto out = at::empty_like(grad);
  at::mul_out(out, grad, at::native::wrapped_scalar_tensor(factor));
  return out;
}

void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected) {
  const auto as_bytes = [](const at::Tensor& t) {
    return t.contiguous().view({-1}).view(at::kByte);
  };
  EXPECT_TRUE(at::equal(as_bytes(actual), as_bytes(expected)));
}

TEST_P(DenseCopy, HasTheBitsOfMul) {
  for (const int divisor : {1, 2, 3, 5, 7}) {
    // Odd, and more than a grain, so that several threads take part if there are any.
    auto grad = at::randn({100'003}, at::kDouble).mul(1e3).to(GetParam());
    grad[0] = std::numeric_limits<double>::infinity();
    grad[1] = std::numeric_limits<double>::denorm_min();
    grad[2] = -0.0;
    grad[3] = 65504.0;
    const auto slot = at::full_like(grad, 7);
    ASSERT_TRUE(pack_scaled_dense(grad, slot, 1.0 / divisor));
    expect_same_bits(slot, product(grad, 1.0 / divisor));
  }
}

TEST_P(DenseCopy, TakesAnyDenseLayout) {
  const auto grad =
      at::randn({2, 3, 4, 5}, at::kFloat).to(GetParam()).contiguous(at::MemoryFormat::ChannelsLast);
  const auto slot = at::empty_like(grad);
  ASSERT_EQ(slot.strides(), grad.strides());
  ASSERT_TRUE(pack_scaled_dense(grad, slot, 1.0 / 3));
  expect_same_bits(slot, product(grad, 1.0 / 3));
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    DenseCopy,
    testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(DenseCopyLimits, LeavesTheRestToTorch) {
  const auto grad = at::randn({4, 6}, at::kFloat);
  const auto slot = at::zeros({4, 6}, at::kFloat);
  EXPECT_FALSE(pack_scaled_dense(grad.to(at::kDouble), slot, 0.5));       // another dtype
  EXPECT_FALSE(pack_scaled_dense(grad.t().contiguous().t(), slot, 0.5));  // another layout
  EXPECT_FALSE(pack_scaled_dense(at::ones({1, 6}).expand({4, 6}), slot, 0.5));
  EXPECT_FALSE(pack_scaled_dense(grad.slice(1, 0, 6, 2), slot.slice(1, 0, 6, 2), 0.5));  // gaps
  EXPECT_FALSE(pack_scaled_dense(grad._neg_view(), slot, 0.5));
  EXPECT_FALSE(pack_scaled_dense(grad.to(at::kComplexFloat), slot.to(at::kComplexFloat), 0.5));
  EXPECT_TRUE(at::equal(slot, at::zeros({4, 6})));
}

TEST(CopyDense, CopiesAnyDtypeAndCountsAsAWrite) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexDouble, at::kLong}) {
    const auto from = at::randn({300, 7}, at::kDouble).mul(10).to(dtype).t();
    const auto to = at::zeros_like(from);
    ASSERT_EQ(from.strides(), to.strides());
    const auto version = to._version();
    ASSERT_TRUE(copy_dense(from, to));
    EXPECT_TRUE(at::equal(to, from));
    EXPECT_GT(to._version(), version);
  }
}

TEST(CopyDense, LeavesOtherLayoutsToTorch) {
  const auto from = at::randn({4, 6});
  EXPECT_FALSE(copy_dense(from, at::zeros({6, 4}).t()));
  EXPECT_FALSE(copy_dense(from, at::zeros({4, 6}, at::kDouble)));
  EXPECT_FALSE(copy_dense(from, at::zeros({6, 4})));
}

}  // namespace
}  // namespace ddpx
