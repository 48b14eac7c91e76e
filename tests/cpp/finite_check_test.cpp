// The search for gradients that are not finite.
#include "observe/finite_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <limits>

#include "fake_collective.h"

namespace ddpx {
namespace {

TEST(FiniteCheck, AGradientWithoutElementsIsFinite) {
  FakeCollective alone{0, 1};
  FiniteCheck check;
  check.check({0, 1}, {at::empty({0, 3}), at::ones({2})});
  EXPECT_TRUE(check.agree(alone, at::kCPU).empty());
}

TEST(FiniteCheck, TheFirstToArriveIsNamed) {
  FakeCollective alone{0, 1};
  FiniteCheck check;
  const auto infinite = at::full({2}, std::numeric_limits<float>::infinity());
  check.record_arrival(2);
  check.record_arrival(1);
  check.check({0, 1, 2}, {at::ones({2}), infinite, infinite});
  const auto findings = check.agree(alone, at::kCPU);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rank, 0);
  EXPECT_EQ(findings[0].param_index, 2u);
}

}  // namespace
}  // namespace ddpx
