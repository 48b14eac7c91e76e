// The rules of the bucket plan, each on a case that was computed by hand.
#include "buckets/bucket_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "errors.h"
#include "plans.h"

namespace ddpx {
namespace {

const c10::Device kCpu(c10::kCPU);

// One byte an element, so that numel is the size in bytes.
ParamMeta bytes(int64_t numel) {
  return ParamMeta{numel, 1, c10::kByte, kCpu, false};
}

ParamMeta floats(int64_t numel) {
  return ParamMeta{numel, 4, c10::kFloat, kCpu, false};
}

ParamMeta sparse(int64_t numel) {
  return ParamMeta{numel, 1, c10::kByte, kCpu, true};
}

Buckets initial(const std::vector<ParamMeta>& params, const BucketCaps& caps, GraphMode mode) {
  return buckets_of(BucketPlan::initial(params, caps, mode));
}

Buckets by_arrival(
    const std::vector<ParamMeta>& params, const BucketCaps& caps, const Indices& arrival_order) {
  return buckets_of(BucketPlan::by_arrival(params, caps, arrival_order));
}

const BucketCaps kSmallCaps{4, 8, {}};

// ---- before any backward ------------------------------------------------------------------------

TEST(InitialPlan, IsOneBucketInDefaultAndStaticMode) {
  const std::vector<ParamMeta> params = {bytes(100), bytes(100), bytes(100)};
  for (const auto mode : {GraphMode::kDefault, GraphMode::kStatic}) {
    EXPECT_EQ(initial(params, kSmallCaps, mode), (Buckets{{0, 1, 2}}));
  }
}

TEST(InitialPlan, IsOneBucketForEachDtypeTheLastRegisteredFirst) {
  const std::vector<ParamMeta> params = {bytes(1), floats(1), bytes(1), floats(1)};
  EXPECT_EQ(initial(params, kSmallCaps, GraphMode::kDefault), (Buckets{{1, 3}, {0, 2}}));
}

TEST(InitialPlan, IsOneBucketForEachDevice) {
  auto elsewhere = bytes(1);
  elsewhere.device = c10::Device(c10::kMeta);
  const std::vector<ParamMeta> params = {bytes(1), elsewhere, bytes(1)};
  EXPECT_EQ(initial(params, kSmallCaps, GraphMode::kDefault), (Buckets{{1}, {0, 2}}));
}

TEST(InitialPlan, IsSplitByCapWhereUnusedParamsAreLookedFor) {
  // Filled in registration order with caps 4, 8, 8, then launched in reverse.
  const std::vector<ParamMeta> params = {bytes(3), bytes(3), bytes(8), bytes(4), bytes(1)};
  EXPECT_EQ(initial(params, kSmallCaps, GraphMode::kFindUnused), (Buckets{{3, 4}, {2}, {0, 1}}));
}

TEST(InitialPlan, IsSplitByListedCapsInEveryMode) {
  const BucketCaps caps{100, 100, {2, 3}};  // the last one, 3, repeats
  const std::vector<ParamMeta> params(6, bytes(2));
  for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
    EXPECT_EQ(initial(params, caps, mode), (Buckets{{5}, {3, 4}, {1, 2}, {0}}));
  }
}

TEST(InitialPlan, KeepsASparseParamAlone) {
  const std::vector<ParamMeta> params = {bytes(1), sparse(1), bytes(1), sparse(1)};
  EXPECT_EQ(initial(params, kSmallCaps, GraphMode::kDefault), (Buckets{{3}, {1}, {0, 2}}));
}

// ---- from an arrival order ----------------------------------------------------------------------

TEST(PlanByArrival, HasASmallFirstBucketAndFollowsTheOrder) {
  const std::vector<ParamMeta> params(6, bytes(4));
  EXPECT_EQ(
      by_arrival(params, kSmallCaps, {5, 3, 4, 0, 2, 1}), (Buckets{{5}, {3, 4}, {0, 2}, {1}}));
}

TEST(PlanByArrival, ClosesABucketWithTheParamThatReachesItsCap) {
  const std::vector<ParamMeta> params = {bytes(3), bytes(9), bytes(7), bytes(1), bytes(1)};
  EXPECT_EQ(by_arrival(params, kSmallCaps, {0, 1, 2, 3, 4}), (Buckets{{0, 1}, {2, 3}, {4}}));
}

TEST(PlanByArrival, CountsBytesNotElements) {
  const std::vector<ParamMeta> params = {floats(1), floats(1), floats(1)};
  EXPECT_EQ(by_arrival(params, kSmallCaps, {0, 1, 2}), (Buckets{{0}, {1, 2}}));
}

TEST(PlanByArrival, TakesListedCapsInsteadOfTheOthers) {
  const BucketCaps caps{1, 1, {4, 2, 6}};
  const std::vector<ParamMeta> params(9, bytes(2));
  EXPECT_EQ(
      by_arrival(params, caps, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
      (Buckets{{0, 1}, {2}, {3, 4, 5}, {6, 7, 8}}));
}

TEST(PlanByArrival, LetsEachDtypeWalkTheCapsOnItsOwn) {
  const std::vector<ParamMeta> params = {bytes(4), floats(1), bytes(8), floats(2)};
  EXPECT_EQ(by_arrival(params, kSmallCaps, {0, 1, 2, 3}), (Buckets{{0}, {1}, {2}, {3}}));
}

TEST(PlanByArrival, PutsBucketsInTheOrderInWhichTheyClose) {
  // The float bucket is opened first and closed last.
  const std::vector<ParamMeta> params = {floats(1), bytes(4), bytes(8), floats(7)};
  const BucketCaps caps{8, 8, {}};
  EXPECT_EQ(by_arrival(params, caps, {0, 1, 2, 3}), (Buckets{{1, 2}, {0, 3}}));
}

TEST(PlanByArrival, PutsBucketsThatNeverCloseLastInTheOrderOfOpening) {
  const std::vector<ParamMeta> params = {floats(1), bytes(1), bytes(9), bytes(1)};
  const BucketCaps caps{8, 8, {}};
  EXPECT_EQ(by_arrival(params, caps, {0, 1, 2, 3}), (Buckets{{1, 2}, {0}, {3}}));
}

TEST(PlanByArrival, LetsASparseParamPassWithoutClosingTheOpenBucket) {
  const std::vector<ParamMeta> params = {bytes(2), sparse(100), bytes(2)};
  EXPECT_EQ(by_arrival(params, kSmallCaps, {0, 1, 2}), (Buckets{{1}, {0, 2}}));
}

TEST(PlanByArrival, GivesAZeroSizeParamASlotButNoBucketOfItsOwn) {
  const std::vector<ParamMeta> params = {bytes(0), bytes(4), bytes(0), bytes(0)};
  EXPECT_EQ(by_arrival(params, kSmallCaps, {0, 1, 2, 3}), (Buckets{{0, 1}, {2, 3}}));
}

TEST(PlanByArrival, GivesEachParamItsBucketIfCapsAreZero) {
  const std::vector<ParamMeta> params = {bytes(1), bytes(0), bytes(1)};
  EXPECT_EQ(by_arrival(params, BucketCaps{0, 0, {}}, {2, 1, 0}), (Buckets{{2}, {1}, {0}}));
}

TEST(PlanByArrival, LocatesEveryParam) {
  const std::vector<ParamMeta> params(4, bytes(4));
  const auto plan = BucketPlan::by_arrival(params, kSmallCaps, {2, 0, 3, 1});  // {2} {0 3} {1}
  EXPECT_EQ(plan.location(3).bucket_index, 1u);
  EXPECT_EQ(plan.location(3).slot_index, 1u);
  EXPECT_EQ(plan.location(1).bucket_index, 2u);
  EXPECT_EQ(plan.location(1).slot_index, 0u);
}

TEST(PlanByArrival, RejectsAnOrderThatIsNoPermutation) {
  const std::vector<ParamMeta> params(3, bytes(4));
  for (const auto& order : std::vector<Indices>{
           {},               // nothing
           {0, 1},           // one missing
           {0, 1, 1},        // one twice, one missing
           {0, 1, 2, 2},     // one twice
           {0, 1, 3},        // one that does not exist
           {0, 1, 2, 3}}) {  // one too many
    EXPECT_THROW(by_arrival(params, kSmallCaps, order), InternalError);
  }
}

TEST(ListedBuckets, AreTakenAsTheyAre) {
  const std::vector<ParamMeta> params = {bytes(4), bytes(4), floats(1)};
  EXPECT_EQ(buckets_of(BucketPlan::listed(params, {{1}, {2}, {0}})), (Buckets{{1}, {2}, {0}}));
  for (const Buckets& wrong : {Buckets{{0, 1}}, Buckets{{0, 2}, {1}}, Buckets{{0, 1}, {2}, {3}}}) {
    EXPECT_THROW(BucketPlan::listed(params, wrong), InternalError);
  }
}

ParamMeta delayed(ParamMeta param) {
  param.delayed = true;
  return param;
}

TEST(DelayedParams, ShareABucketOfTheirOwnWithoutCap) {
  const std::vector<ParamMeta> params = {bytes(4), delayed(bytes(4)), bytes(4), delayed(bytes(4))};
  const auto plan = BucketPlan::by_arrival(params, BucketCaps{4, 4, {}}, {3, 2, 1, 0});
  EXPECT_EQ(buckets_of(plan), (Buckets{{2}, {0}, {3, 1}}));
}

TEST(DelayedParams, StandBehindTheBucketOfTheirGate) {
  const std::vector<ParamMeta> params = {bytes(4), delayed(bytes(4)), bytes(4), bytes(4)};
  const auto plan = BucketPlan::by_arrival(params, BucketCaps{4, 4, {}}, {3, 2, 1, 0});
  EXPECT_EQ(buckets_of(plan.delayed_behind(params, 3)), (Buckets{{3}, {1}, {2}, {0}}));
  EXPECT_EQ(buckets_of(plan.delayed_behind(params, 0)), (Buckets{{3}, {2}, {0}, {1}}));
}

TEST(DelayedParams, HaveABucketForEachDtype) {
  const std::vector<ParamMeta> params = {bytes(4), delayed(bytes(4)), delayed(floats(1))};
  const auto plan = BucketPlan::initial(params, BucketCaps{4, 4, {}}, GraphMode::kDefault);
  EXPECT_EQ(buckets_of(plan.delayed_behind(params, 0)), (Buckets{{0}, {2}, {1}}));
}

}  // namespace
}  // namespace ddpx
