// Kinds of gradient tensors: which hold their values, and how they are packed and written.
#include "buckets/grad_values.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "buckets/packing.h"
#include "fake_collective.h"

namespace ddpx {
namespace {

at::Tensor complex_numbers() {
  return at::complex(at::arange(6, at::kFloat), at::arange(6, at::kFloat) - 2).view({2, 3});
}

at::Tensor inference_tensor() {
  const c10::InferenceMode guard;
  return at::ones({2, 3});
}

TEST(HoldsValues, OnlyIfTheMemoryShowsThem) {
  const auto plain = at::ones({2, 3});
  EXPECT_TRUE(holds_values_on_cpu(plain));
  EXPECT_TRUE(holds_values_on_cpu(plain.t()));
  EXPECT_TRUE(holds_values_on_cpu(plain.detach().requires_grad_()));
  EXPECT_TRUE(holds_values_on_cpu(at::ones({1, 3}).expand({2, 3})));
  EXPECT_TRUE(holds_values_on_cpu(inference_tensor()));
  EXPECT_TRUE(holds_values_on_cpu(complex_numbers()));
  EXPECT_TRUE(holds_values_on_cpu(at::real(complex_numbers().conj())));
  EXPECT_FALSE(holds_values(complex_numbers().conj()));
  EXPECT_FALSE(holds_values(at::imag(complex_numbers().conj())));
  EXPECT_FALSE(holds_values(plain._neg_view()));
  EXPECT_FALSE(holds_values(at::_efficientzerotensor({2, 3})));
  EXPECT_FALSE(holds_values(plain.to_sparse()));
  EXPECT_FALSE(holds_values(plain.to_sparse_csr()));
  EXPECT_FALSE(holds_values(at::quantize_per_tensor(plain, 0.1, 0, at::kQInt8)));
  EXPECT_TRUE(holds_values(plain.to(at::kMeta)));
  EXPECT_FALSE(holds_values_on_cpu(plain.to(at::kMeta)));
}

TEST(HasValues, OfEverythingThatOperatorsCanRead) {
  const auto plain = at::ones({2, 3});
  const auto lazy = complex_numbers().conj()._neg_view();
  EXPECT_TRUE(has_values(lazy));
  EXPECT_TRUE(copy_of_values(lazy).equal(-complex_numbers().conj().resolve_conj()));
  EXPECT_TRUE(holds_values(copy_of_values(lazy)));
  EXPECT_TRUE(copy_of_values(at::_efficientzerotensor({2, 3})).equal(at::zeros({2, 3})));
  EXPECT_FALSE(has_values(plain.to_sparse()));
  EXPECT_FALSE(has_values(plain.to_sparse_csr()));
  EXPECT_FALSE(has_values(at::quantize_per_tensor(plain, 0.1, 0, at::kQInt8)));
}

TEST(TakesValues, UnlessElementsShareAnAddressOrTorchChangesNothing) {
  const auto base = at::zeros({24});
  EXPECT_TRUE(takes_values(base.as_strided({2, 3}, {1, 2}), {2, 3}));
  EXPECT_TRUE(takes_values(base.as_strided({2, 3}, {12, 4}), {2, 3}));
  EXPECT_TRUE(takes_values(base.as_strided({1, 3}, {0, 2}), {1, 3})) << "one row, any stride";
  EXPECT_TRUE(takes_values(base._neg_view().narrow(0, 0, 6).view({2, 3}), {2, 3}));
  EXPECT_FALSE(takes_values(base.as_strided({2, 3}, {1, 1}), {2, 3}));
  EXPECT_FALSE(takes_values(base.as_strided({2, 3}, {0, 1}), {2, 3}));
  EXPECT_FALSE(takes_values(base, {2, 3}));
  EXPECT_FALSE(takes_values(inference_tensor(), {2, 3}));
  EXPECT_FALSE(takes_values(at::_efficientzerotensor({2, 3}), {2, 3}));
  EXPECT_FALSE(takes_values(at::zeros({2, 3}).to_sparse(), {2, 3}));
}

// A bucket of two square params.
struct SmallBucket {
  explicit SmallBucket(at::ScalarType dtype = at::kFloat)
      : params{
            at::zeros({3, 3}, dtype).set_requires_grad(true),
            at::zeros({3, 3}, dtype).set_requires_grad(true)} {}

  at::Tensor numbers() const {
    const auto real = at::arange(9, at::kFloat).view({3, 3});
    return params[0].is_complex() ? at::complex(real, 2 - real) : real;
  }
  void pack_first(GradPlace place) {
    pack(bucket, slot(), params[0], params[0].grad(), 2, place);
  }
  const Slot& slot() const {
    return bucket.slots()[0];
  }

  std::vector<at::Tensor> params;
  FakeCollective collective{0, 2};
  Bucket bucket{BucketSpec{{0, 1}}, params, /*sparse=*/false, collective};
};

TEST(FindMisfit, AGradientWithoutElementsFitsItsSlot) {
  const std::vector<at::Tensor> params = {at::zeros({3, 0}), at::zeros({2})};
  FakeCollective collective{0, 2};
  const Bucket bucket{BucketSpec{{0, 1}}, params, /*sparse=*/false, collective};
  const auto& slot = bucket.slots()[0];
  EXPECT_FALSE(find_misfit(bucket, slot, slot.view.variable_data()));
}

class OddGrad : public testing::TestWithParam<GradPlace> {};

TEST_P(OddGrad, InItsSlotButTransposedOrLazyIsPackedByItsValues) {
  SmallBucket real;
  real.slot().view.copy_(real.numbers());
  real.params[0].mutable_grad() = real.slot().view.t();
  real.pack_first(GetParam());
  EXPECT_TRUE(real.slot().view.equal(real.numbers().t() / 2));

  SmallBucket complex(at::kComplexFloat);
  complex.slot().view.copy_(complex.numbers());
  complex.params[0].mutable_grad() = complex.slot().view.conj();
  complex.pack_first(GetParam());
  EXPECT_TRUE(complex.slot().view.equal(complex.numbers().conj().resolve_conj() / 2));
}

TEST_P(OddGrad, IsWrittenByItsValues) {
  SmallBucket real;
  const auto write = [&](const at::Tensor& grad) {
    real.params[0].mutable_grad() = grad;
    pack(real.bucket, real.slot(), real.params[0], real.numbers(), 1, GradPlace::kOwnMemory);
    real.bucket.launch(real.collective);
    real.bucket.wait(real.collective);
    write_back(real.bucket, {&real.slot()}, real.params, GetParam());
    const auto& written = real.params[0].grad();
    EXPECT_TRUE(written.equal(3 * real.numbers()));  // what FakeCollective makes of 2 ranks
    return written.is_same(grad);
  };
  const bool in_place = GetParam() == GradPlace::kOwnMemory;
  EXPECT_EQ(write(at::ones({3, 3})._neg_view()), in_place);
  EXPECT_EQ(write(at::ones({3, 3, 2}).select(2, 1)), in_place);
  EXPECT_FALSE(write(at::ones({1, 3}).expand({3, 3})));
  EXPECT_FALSE(write(at::ones({5}).as_strided({3, 3}, {1, 1})));
  EXPECT_FALSE(write(at::_efficientzerotensor({3, 3})));
  EXPECT_FALSE(write(at::ones({3, 3}).to_sparse()));
}

INSTANTIATE_TEST_SUITE_P(
    Places,
    OddGrad,
    testing::Values(GradPlace::kOwnMemory, GradPlace::kInSlot),
    [](const auto& info) { return info.param == GradPlace::kInSlot ? "InSlot" : "OwnMemory"; });

TEST(FindMisfit, NamesWhatCannotBePacked) {
  SmallBucket bucket;
  const auto misfit_of = [&](const at::Tensor& grad) {
    const auto misfit = find_misfit(bucket.bucket, bucket.slot(), grad);
    return misfit ? misfit->gradient : std::string();
  };
  const auto plain = at::ones({3, 3});
  EXPECT_EQ(misfit_of(plain._neg_view()), "");
  EXPECT_EQ(misfit_of(at::_efficientzerotensor({3, 3})), "");
  EXPECT_EQ(misfit_of(bucket.slot().view.t()), "");
  EXPECT_EQ(misfit_of(plain.to_sparse()), "a sparse Float tensor of shape [3, 3] on cpu");
  EXPECT_EQ(misfit_of(plain.to_sparse_csr()), "a SparseCsr Float tensor of shape [3, 3] on cpu");
  EXPECT_NE(misfit_of(at::quantize_per_tensor(plain, 0.1, 0, at::kQInt8)), "");
  EXPECT_NE(misfit_of(plain.to(at::kMeta)), "");
  EXPECT_NE(misfit_of(at::_nested_tensor_from_tensor_list({plain, plain})), "");
  EXPECT_NE(
      misfit_of(bucket.bucket.slots()[1].view).find("memory of the gradient of another parameter"),
      std::string::npos);
  for (const auto place : {GradPlace::kOwnMemory, GradPlace::kMovedOut}) {
    bucket.params[0].mutable_grad() = plain.to_sparse_csr();
    pack(bucket.bucket, bucket.slot(), bucket.params[0], {}, 2, place);
    EXPECT_FALSE(move_into_slot(bucket.bucket, bucket.slot(), bucket.params[0]));
  }
}

}  // namespace
}  // namespace ddpx
