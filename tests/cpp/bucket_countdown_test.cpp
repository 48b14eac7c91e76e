// How many gradients each bucket of a step waits for.
#include "readiness/bucket_countdown.h"

#include <gtest/gtest.h>

#include "errors.h"
#include "plans.h"

namespace ddpx {
namespace {

TEST(BucketCountdown, TheLastGradientCompletesABucket) {
  const auto plan = plan_of({2, 1});
  BucketCountdown countdown(plan, {});
  EXPECT_FALSE(countdown.count_down(0));
  EXPECT_TRUE(countdown.count_down(1));
  EXPECT_TRUE(countdown.count_down(0));
}

TEST(BucketCountdown, ADelayedBucketWaitsForTheTriggerToo) {
  const auto plan = plan_of({1, 2});
  BucketCountdown countdown(plan, {1});
  EXPECT_FALSE(countdown.count_down(1));
  EXPECT_FALSE(countdown.count_down(1));
  EXPECT_TRUE(countdown.count_down(1));
}

TEST(BucketCountdown, OneGradientTooManyIsABug) {
  const auto plan = plan_of({1});
  BucketCountdown countdown(plan, {});
  countdown.count_down(0);
  EXPECT_THROW(countdown.count_down(0), InternalError);
}

}  // namespace
}  // namespace ddpx
