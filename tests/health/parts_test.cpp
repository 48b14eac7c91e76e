// Parts of the monitor, without threads of the watchdog.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fake_store.h"
#include "health/machine/clock.h"
#include "health/machine/names.h"
#include "health/verdict/cause_search.h"
#include "health/verdict/stall_watch.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

TEST(AwakeTimeTest, TimeBeforeAStopDoesNotCount) {
  AwakeTime awake;
  awake.update(10 * kSecond);
  awake.update(11 * kSecond);
  EXPECT_EQ(awake.since_ns(), 10 * kSecond);
  EXPECT_EQ(awake.lasted_ns(5 * kSecond, 11 * kSecond), kSecond);
  awake.update(13 * kSecond);
  EXPECT_EQ(awake.lasted_ns(5 * kSecond, 14 * kSecond), kSecond);
  EXPECT_EQ(awake.lasted_ns(15 * kSecond, 14 * kSecond), 0);
}

TEST(WrapperNamesTest, OnlyParamsOfALongBackwardAreMissing) {
  WrapperNames wrappers;
  wrappers.set(3, {.missing_params = [] { return std::vector<std::string>{"a", "b"}; }});
  const Activity recent{Doing::kBackward, 3, 0, 0, now_ns()};
  const Activity late{Doing::kBackward, 3, 0, 0, now_ns() - 2 * kSecond};
  const Activity other{Doing::kBackward, 4, 0, 0, now_ns() - 2 * kSecond};
  EXPECT_EQ(wrappers.describe_missing(recent), "");
  EXPECT_EQ(wrappers.describe_missing(late), "without gradients yet for 'a', 'b'");
  EXPECT_EQ(wrappers.describe_missing(other), "");
}

// Two ranks of one host that have met.
struct TwoRanks {
  TwoRanks() {
    const auto store = std::make_shared<FakeStore>();
    for (const int rank : {0, 1}) {
      states.push_back(GroupState::create(group_of(rank, 2), access_to(store)));
    }
    meet(states);
  }
  GroupState& operator[](std::size_t rank) {
    return *states[rank];
  }

  std::vector<std::shared_ptr<GroupState>> states;
};

TEST(FindCauseTest, ARankThatHasLeftMattersIfItIsMissing) {
  TwoRanks ranks;
  ranks[1].page.end_as(Presence::kLeft);
  ranks[0].page.publish({.doing = Doing::kWaiting, .step = 3});
  EXPECT_FALSE(find_cause(ranks[0], Reason::kWatches, 0));
  EXPECT_FALSE(find_cause(ranks[0], Reason::kHasNoLease, now_ns()));
  EXPECT_FALSE(find_cause(ranks[0], Reason::kWaits, now_ns()));
  const auto left = find_cause(ranks[0], Reason::kWaits, now_ns() - kSecond);
  ASSERT_TRUE(left);
  EXPECT_EQ(left->kind, FailureKind::kLeft);
  ranks[1].page.publish({.doing = Doing::kOutside, .step = 4});  // rank 1 has done its part
  EXPECT_FALSE(find_cause(ranks[0], Reason::kWaits, now_ns() - kSecond));
  EXPECT_TRUE(find_cause(ranks[0], Reason::kCallFailed, now_ns()));
  ranks[0].page.end_as(Presence::kTerminated);
  EXPECT_FALSE(find_cause(ranks[0], Reason::kCallFailed, now_ns()));
}

TEST(FindCauseTest, AFailingRankAlwaysMattersAndAFailureOfTheHostComesFirst) {
  TwoRanks ranks;
  ranks[1].page.fail("ValueError: no", /*blames_peer=*/false);
  const auto failing = find_cause(ranks[0], Reason::kWatches, 0);
  ASSERT_TRUE(failing);
  EXPECT_EQ(failing->first_rank(), 1);
  const Failure declared{FailureKind::kMismatch, {}, "declared"};
  ranks[1].table()->declare(declared.encode());
  EXPECT_EQ(find_cause(ranks[0], Reason::kWatches, 0)->how, "declared");
}

TEST(FindCauseTest, AnUnknownRankMattersAfterAllHadTime) {
  const auto store = std::make_shared<FakeStore>();
  const auto state = GroupState::create(group_of(0, 2), access_to(store));
  EXPECT_FALSE(find_cause(*state, Reason::kCallFailed, now_ns()));
  const auto unknown = find_cause(*state, Reason::kAllHadTime, now_ns());
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->first_rank(), 1);
}

TEST(StallWatchTest, AWaitFailsBecauseOfMissingRanksOrOfTheCommunication) {
  TwoRanks ranks;
  const StallWatch stalls(ranks[0]);
  const Activity own{Doing::kWaiting, 0, 0, 3, 0};
  const auto late = stalls.find_stall({.at = own, .missing = {1}}, kSecond);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->first_rank(), 1);
  EXPECT_EQ(late->lost.front().what, "has not come for 1.00 s");
  const auto nobody = stalls.find_stall({.at = own}, kSecond);
  ASSERT_TRUE(nobody);
  EXPECT_TRUE(contains(nobody->how, "the communication has taken 1.00 s so far")) << nobody->how;
  EXPECT_FALSE(stalls.find_stall({.at = {Doing::kHook, 0, 0, 3, 0}}, kSecond));
}

}  // namespace
}  // namespace ddpx::health
