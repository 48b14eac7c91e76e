// Packing a bucket at once has the bits of packing its gradients one by one.
#include "slot_io.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <vector>

#include "fake_collective.h"

namespace ddpx {
namespace {

constexpr int kDivisor = 3;  // for which a product with 1/3 and a quotient by 3 differ

enum class Kind { kOutside, kInSlot, kNone, kLeftOut };

struct Case {
  const char* name;
  std::vector<Kind> kinds;  // per param
};

class PackTogether : public testing::TestWithParam<std::tuple<Case, bool>> {
 protected:
  // The buckets of two models with the same gradients.
  struct Side {
    std::vector<at::Tensor> params;
    std::vector<bool> left_out;
    FakeCollective collective{0, kDivisor};
    std::unique_ptr<Bucket> bucket;
  };

  static void fill(Side& side, const std::vector<Kind>& kinds) {
    BucketSpec spec;
    at::manual_seed(0);
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const auto size = 3 + static_cast<int64_t>(i);
      side.params.push_back(at::randn({size, 5}).set_requires_grad(true));
      side.left_out.push_back(kinds[i] == Kind::kLeftOut);
      spec.param_indices.push_back(i);
    }
    side.bucket = std::make_unique<Bucket>(spec, side.params, false, side.collective);
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const auto& slot = side.bucket->slots()[i];
      const auto grad = at::randn_like(side.params[i].detach());
      slot.view.copy_(grad);
      if (kinds[i] == Kind::kOutside) {
        side.params[i].mutable_grad() = grad;
      } else if (kinds[i] == Kind::kInSlot) {
        side.params[i].mutable_grad() = slot.view;
      }
    }
  }
};

TEST_P(PackTogether, HasTheBitsOfPack) {
  const auto& [test_case, as_view] = GetParam();
  Side one_by_one;
  Side together;
  fill(one_by_one, test_case.kinds);
  fill(together, test_case.kinds);
  for (const auto& slot : one_by_one.bucket->slots()) {
    if (!one_by_one.left_out[slot.param_index]) {
      pack(*one_by_one.bucket, slot, one_by_one.params[slot.param_index], kDivisor, as_view);
    }
  }
  pack_scaled_together(*together.bucket, together.params, together.left_out, kDivisor, as_view);
  for (std::size_t i = 0; i < test_case.kinds.size(); ++i) {
    const auto& expected = one_by_one.bucket->slots()[i].view;
    const auto& actual = together.bucket->slots()[i].view;
    EXPECT_TRUE(at::equal(actual, expected)) << "param " << i;
    const auto& grad = together.params[i].grad();
    EXPECT_EQ(grad.defined(), one_by_one.params[i].grad().defined());
    EXPECT_EQ(
        grad.defined() && grad.is_alias_of(actual),
        one_by_one.params[i].grad().defined() && one_by_one.params[i].grad().is_alias_of(expected));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    PackTogether,
    testing::Combine(
        testing::Values(
            Case{"AllOutside", {Kind::kOutside, Kind::kOutside, Kind::kOutside}},
            Case{"AllInSlot", {Kind::kInSlot, Kind::kInSlot}},
            Case{"SomeInSlot", {Kind::kOutside, Kind::kInSlot, Kind::kOutside}},
            Case{"SomeWithout", {Kind::kNone, Kind::kOutside, Kind::kInSlot}},
            Case{"SomeLeftOut", {Kind::kOutside, Kind::kLeftOut, Kind::kInSlot}}),
        testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + (std::get<1>(info.param) ? "AsView" : "");
    });

}  // namespace
}  // namespace ddpx
