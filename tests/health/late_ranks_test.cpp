// Reports of ranks that are late: the stall error, and the timeout of the group.
#include <gtest/gtest.h>

#include <vector>

#include "health/monitor.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

TEST(MonitorTest, PatienceEndsWithTheMissingRank) {
  auto& timeouts = StallTimeouts::instance();
  timeouts.raise_ns = 300'000'000;
  Ranks ranks("AA");
  ranks[1].page().publish({.doing = Doing::kForward, .step = 3});
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  EXPECT_TRUE(eventually([&] { return ranks[0].failed(); }));
  timeouts.raise_ns = StallTimeouts::kNever;
  ASSERT_TRUE(ranks[0].failed());
  EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kStalled);
  // The late rank learns that no rank waits for it any more.
  ASSERT_TRUE(eventually([&] { return ranks[1].failed(); }));
  const auto text = error_of([&] { ranks[1].raise_if_failed(); });
  EXPECT_TRUE(contains(text, "] this rank is the late one, ")) << text;
}

TEST(MonitorTest, PatienceEndsThoughNobodyIsMissing) {
  auto& timeouts = StallTimeouts::instance();
  timeouts.raise_ns = 300'000'000;
  Ranks ranks("AA");
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].page().publish({.doing = Doing::kWaiting, .step = 3});
  }
  EXPECT_TRUE(eventually([&] { return ranks[0].failed() && ranks[1].failed(); }));
  timeouts.raise_ns = StallTimeouts::kNever;
  const auto text = error_of([&] { ranks[0].raise_if_failed(); });
  EXPECT_TRUE(contains(text, "no rank is missing, but the communication has taken")) << text;
  EXPECT_FALSE(contains(text, "shrink")) << text;
}

// Rank 2 is late, and rank 1 waits for rank 2. Returns the ranks that rank 0, of another host,
// blames. Ranks publish their states every 200 ms, and hosts write every 500 ms. With a shorter
// `raise_ns`, rank 0 may still have an older state of rank 1.
std::vector<int> blamed_with_delay(int delay_ms, int64_t raise_ns) {
  auto& timeouts = StallTimeouts::instance();
  Ranks ranks("ABB");
  ranks.store->delay_ms = delay_ms;
  ranks[2].page().publish({.doing = Doing::kForward, .step = 3});
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].page().publish({.doing = Doing::kWaiting, .step = 3});
  }
  timeouts.raise_ns = raise_ns;
  EXPECT_TRUE(eventually([&] { return ranks[0].failed(); }));
  timeouts.raise_ns = StallTimeouts::kNever;
  return ranks.blamed_by(0);
}

TEST(MonitorTest, OfOtherMachinesOnlyTheLateAreBlamed) {
  EXPECT_EQ(blamed_with_delay(0, 1'000'000'000), std::vector<int>{2});
}

TEST(MonitorTest, ThoughTheStoreIsSlow) {
  EXPECT_EQ(blamed_with_delay(400, 4'000'000'000), std::vector<int>{2});
}

TEST(MonitorTest, AWaitBehindUnevenCallsIsTold) {
  auto& timeouts = StallTimeouts::instance();
  Ranks ranks("AA");
  const StepCalls theirs{0, 3, 1, 0, 8, 0};
  ranks[1].page().view().calls.publish(theirs);
  ranks[1].page().publish({.doing = Doing::kWaiting, .step = 3});
  const StepCalls ours{0, 3, 1, 0, 7, 0};
  ranks[0].page().view().calls.publish(ours);
  timeouts.warn_ns = 300'000'000;
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  const auto message = ranks.warning_of(0);
  timeouts.warn_ns = times::kWarn;
  EXPECT_TRUE(contains(message, "before this step (rank 0: 7, rank 1: 8)")) << message;
  EXPECT_FALSE(ranks[0].failed());
  timeouts.raise_ns = 300'000'000;
  EXPECT_TRUE(eventually([&] { return ranks[0].failed(); }));
  timeouts.raise_ns = StallTimeouts::kNever;
  const auto text = error_of([&] { ranks[0].raise_if_failed(); });
  EXPECT_TRUE(contains(text, "ranks wait for each other in step 3")) << text;
}

TEST(MonitorTest, AtTheGroupsTimeoutItIsSaidWhoDidNotCome) {
  Ranks ranks("AAA");
  for (const std::size_t rank : {0u, 1u}) {
    ranks[rank].page().publish({.doing = Doing::kWaiting, .step = 3});
  }
  EXPECT_EQ(error_of([&] { ranks[0].explain_error("Connection reset by peer"); }), "no error");
  ranks[0].page().publish(
      {.doing = Doing::kBackward, .bucket = 1, .step = 3});  // rank 1 waits for no rank
  EXPECT_EQ(error_of([&] { ranks[0].explain_error("Timed out waiting 3000ms"); }), "no error");
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  EXPECT_EQ(error_of([&] { ranks[0].explain_error("timeout of something else"); }), "no error");
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  const auto text = error_of([&] { ranks[0].explain_error("Timed out waiting 3000ms"); });
  EXPECT_TRUE(contains(text, "] rank 2 (host ") && contains(text, ") has not come for ")) << text;
  EXPECT_TRUE(contains(text, "The backend said: Timed out waiting 3000ms")) << text;
  EXPECT_FALSE(contains(text, "And rank 1")) << text;
  const auto same = error_of([&] { ranks[1].explain_error("Connection closed by peer"); });
  EXPECT_TRUE(contains(same, "] rank 2 (host ")) << same;
}

// A rank that has not come when a wait is given up may live.
TEST(MonitorTest, AtTheGroupsTimeoutWhoWasNeverHeardOfIsLate) {
  const auto store = std::make_shared<FakeStore>();
  const auto waits = watch(group_of(0, 2), access_to(store));
  waits->page().publish({Doing::kConstruction, kNoModel, 1, 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  const auto text = error_of([&] { waits->explain_error("Timed out waiting 3000ms"); });
  EXPECT_TRUE(contains(text, ", and has no wrapper of this process group yet")) << text;
  EXPECT_EQ(waits->report()->failure.kind, FailureKind::kStalled);
}

TEST(MonitorTest, AtTheGroupsTimeoutWhoseHostIsSilentIsLate) {
  Ranks ranks("AB");
  ranks.lose(1);
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  const auto text = error_of([&] { ranks[0].explain_error("Timed out waiting 3000ms"); });
  EXPECT_TRUE(contains(text, "has not come for ")) << text;
  EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kStalled);
}

}  // namespace
}  // namespace ddpx::health
