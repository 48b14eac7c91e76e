// Ranks that gave a wrapper different settings, and wait for each other.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "health/calls/uneven_waits.h"
#include "health/machine/page.h"
#include "health/times.h"
#include "health/verdict/failure.h"
#include "health/verdict/peer_table.h"

namespace ddpx::health {
namespace {

// Both ranks have launched the first bucket of step 3 of wrapper 1, and have waited for long
// enough. Rank 1 has a communication hook.
class UnevenSettings : public testing::Test {
 protected:
  UnevenSettings() {
    const auto introduction = Introduction::own(1, "", theirs_.fd(), theirs_.view().token.load());
    peers_.add(std::make_shared<Peer>(introduction, os::this_process(), ours_.host()));
    launch(ours_, 3, StepCalls::kKnown);
    launch(theirs_, 3, StepCalls::kKnown | StepCalls::kHasHook);
  }

  void SetUp() override {
    ASSERT_NE(peers_.peer(1)->page(), nullptr);
  }

  static void launch(OwnPage& page, uint32_t step, uint64_t settings) {
    page.view().calls.publish(
        StepCalls{.wrapper = 1, .step = step, .num_launched = 1, .settings = settings});
  }

  std::string find() {
    ours_.view().current.store(our_activity);
    theirs_.view().current.store(their_activity);
    const auto failure = find_uneven_settings(peers_, ours_.view(), awake_since_ns);
    EXPECT_TRUE(!failure || failure->kind == FailureKind::kSettings);
    return failure ? failure->how : std::string();
  }

  OwnPage ours_{1, /*world_size=*/2};
  OwnPage theirs_{2, /*world_size=*/2};
  PeerTable peers_{0, 2};

  const int64_t long_ago_ns = now_ns() - times::kUnevenSettings;
  int64_t awake_since_ns = 0;  // this process was not stopped since then
  Activity our_activity{
      .doing = Doing::kWaiting, .model = 1, .bucket = 0, .step = 3, .since_ns = long_ago_ns};
  Activity their_activity{
      .doing = Doing::kHook, .model = 1, .bucket = 0, .step = 3, .since_ns = long_ago_ns};
};

constexpr const char* kHookOfRank1 =
    "rank 1 has a communication hook, and rank 0 has none, in step 3 of wrapper 1";

TEST_F(UnevenSettings, AreNamed) {
  EXPECT_EQ(find(), kHookOfRank1);
  launch(ours_, 3, StepCalls::kKnown | StepCalls::kIsStatic | StepCalls::kChecksFinite);
  EXPECT_EQ(
      find(),
      "rank 1 has a communication hook, and rank 0 has none; rank 0 has a static graph, and rank 1 "
      "does not; rank 0 checks that gradients are finite, and rank 1 does not, in step 3 of "
      "wrapper 1");
}

TEST_F(UnevenSettings, AreNotGuessed) {
  launch(ours_, 3, 0);
  EXPECT_EQ(find(), "");
  launch(ours_, 3, StepCalls::kKnown | StepCalls::kHasHook);
  EXPECT_EQ(find(), "");
}

TEST_F(UnevenSettings, NeedWaitsOfSomeDurationOfAllRanks) {
  our_activity.since_ns = now_ns();
  EXPECT_EQ(find(), "");
  our_activity.since_ns = long_ago_ns;
  their_activity.since_ns = now_ns();
  EXPECT_EQ(find(), "");
  their_activity.since_ns = long_ago_ns;
  their_activity.doing = Doing::kBackward;
  EXPECT_EQ(find(), "");
  their_activity.doing = Doing::kWaiting;
  their_activity.model = 0;
  EXPECT_EQ(find(), "");
}

TEST_F(UnevenSettings, NeedAWaitOfAProcessThatRuns) {
  awake_since_ns = now_ns() - times::kUnevenSettings / 2;
  EXPECT_EQ(find(), "");
}

TEST_F(UnevenSettings, AreNoFailureBesideAnUnknownRank) {
  ours_.view().current.store(our_activity);
  theirs_.view().current.store(their_activity);
  PeerTable peers{0, 3};  // rank 2 may be late
  peers.add(peers_.peer(1));
  EXPECT_FALSE(find_uneven_settings(peers, ours_.view(), awake_since_ns));
}

TEST_F(UnevenSettings, AreThoseOfTheLastCommonStep) {
  our_activity.step = 4;  // rank 0 has launched nothing in step 4
  EXPECT_EQ(find(), kHookOfRank1);
  their_activity.step = 4;
  EXPECT_EQ(find(), kHookOfRank1);
  launch(ours_, 4, StepCalls::kKnown);
  launch(theirs_, 4, StepCalls::kKnown);
  EXPECT_EQ(find(), "") << "both ranks have the same settings by now";
}

TEST(UnevenSettingsFailure, IsAMismatch) {
  const Failure failure{FailureKind::kSettings, {}, "how"};
  EXPECT_STREQ(error_name(failure.kind), "ddpx.RankMismatch");
  const auto decoded = Failure::decode(failure.encode());
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->kind, FailureKind::kSettings);
}

}  // namespace
}  // namespace ddpx::health
