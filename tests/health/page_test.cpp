// Status pages: a peer reads what the owner wrote, or nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "health/calls/step_tracker.h"
#include "health/machine/page.h"

namespace ddpx::health {
namespace {

StepCalls calls(uint32_t wrapper, uint32_t step) {
  return StepCalls{.wrapper = wrapper, .step = step, .num_launched = 1, .digest = step + 100u};
}

TEST(PageTest, ActivitiesAreSeen) {
  OwnPage page(1, /*world_size=*/1);
  EXPECT_EQ(page.view().activity().doing, Doing::kOutside);
  EXPECT_EQ(page.view().activity().model, kNoModel);
  page.publish({.doing = Doing::kHook, .model = 7, .bucket = 0xabcd, .step = 0x12345678});
  const auto seen = page.view().activity();
  EXPECT_EQ(seen.doing, Doing::kHook);
  EXPECT_EQ(seen.model, 7);
  EXPECT_EQ(seen.bucket, 0xabcd);
  EXPECT_EQ(seen.step, 0x12345678u);
  EXPECT_GT(seen.since_ns, 0);
}

TEST(PageTest, ActivitiesOfTwoThreadsAreNeverMixed) {
  OwnPage page(1, /*world_size=*/1);
  const Activity first{.doing = Doing::kBackward, .model = 1, .bucket = 1, .step = 1};
  const Activity second{.doing = Doing::kWaiting, .model = 2, .bucket = 2, .step = 2};
  page.publish(first);
  std::atomic<bool> stop{false};
  const auto publish = [&](const Activity& activity) {
    while (!stop) {
      page.publish(activity);
    }
  };
  std::thread one(publish, first);
  std::thread other(publish, second);
  for (const auto begin_ns = now_ns(); now_ns() - begin_ns < 300'000'000;) {
    const auto seen = page.view().activity();
    EXPECT_EQ(seen.packed(), seen.model == 2 ? second.packed() : first.packed());
  }
  stop = true;
  one.join();
  other.join();
}

TEST(PageTest, ABackwardGoesOnAtALaunch) {
  OwnPage page(1, /*world_size=*/1);
  const auto since = [&page](const Activity& activity) {
    const auto before = now_ns();
    while (now_ns() == before) {
    }
    page.publish(activity);
    return page.view().activity().since_ns;
  };
  const auto start = since({.doing = Doing::kBackward, .step = 3});
  EXPECT_EQ(since({.doing = Doing::kBackward, .bucket = 1, .step = 3}), start);
  EXPECT_EQ(page.view().activity().bucket, 1);
  EXPECT_GT(since({.doing = Doing::kBackward, .step = 4}), start);
  const auto wait = since({.doing = Doing::kWaiting, .step = 4});
  EXPECT_GT(since({.doing = Doing::kWaiting, .bucket = 1, .step = 4}), wait);
}

TEST(PageTest, CallsStayForSomeSteps) {
  OwnPage page(1, /*world_size=*/1);
  const auto& recent = page.view().calls;
  for (uint32_t step = 0; step < 20; ++step) {
    page.view().calls.publish(calls(0, step));
  }
  EXPECT_FALSE(recent.find(0, 2));
  ASSERT_TRUE(recent.find(0, 19));
  EXPECT_EQ(recent.find(0, 19)->digest, 119u);
  EXPECT_TRUE(recent.find(0, 5));
  EXPECT_TRUE(recent.find(0, 0)) << "one of each 16";
  EXPECT_FALSE(recent.find(1, 19));
}

TEST(PageTest, OnlyTheFirstEndCounts) {
  OwnPage page(1, /*world_size=*/1);
  page.fail("first", /*blames_peer=*/false);
  page.fail("second", /*blames_peer=*/true);
  page.end_as(Presence::kLeft);
  EXPECT_EQ(page.view().presence(), Presence::kFailing);
  EXPECT_EQ(page.view().cause.read(), "first");
  EXPECT_FALSE(page.view().blames_peer);

  OwnPage other(2, /*world_size=*/1);
  other.end_as(Presence::kLeft);
  EXPECT_EQ(other.view().presence(), Presence::kLeft);
  other.fail("late", /*blames_peer=*/true);
  EXPECT_EQ(other.view().presence(), Presence::kFailing);
}

TEST(PageTest, ATerminatedRankMayStillFail) {
  OwnPage page(1, /*world_size=*/1);
  page.end_as(Presence::kTerminated);
  page.end_as(Presence::kLeft);
  EXPECT_EQ(page.view().presence(), Presence::kTerminated);
  page.fail("ValueError: no", /*blames_peer=*/false);
  EXPECT_EQ(page.view().presence(), Presence::kFailing);
}

TEST(PageTest, LongTextsAreCut) {
  OwnPage page(1, /*world_size=*/1);
  page.fail(std::string(5000, 'x'), /*blames_peer=*/false);
  EXPECT_EQ(page.view().cause.read(), std::string(2048, 'x'));
}

TEST(PageTest, TextsAreCutBetweenCharacters) {
  OwnPage page(1, /*world_size=*/1);
  std::string euros;
  for (int i = 0; i < 1000; ++i) {
    euros += "\xE2\x82\xAC";  // 3 bytes each, which do not divide 2048
  }
  page.fail(euros, /*blames_peer=*/false);
  const auto cause = page.view().cause.read();
  EXPECT_EQ(cause.size(), 2046u);
  EXPECT_EQ(cause, euros.substr(0, 2046));
}

TEST(PageTest, TwoThreadsMayWriteAText) {
  OwnPage page(1, /*world_size=*/1);
  auto& agreement = page.view().agreement;
  std::atomic<int> running{2};
  const auto write = [&](char letter) {
    for (std::size_t i = 0; i < 20'000; ++i) {
      agreement.write(std::string(1 + i % 100, letter));
    }
    --running;
  };
  std::thread first(write, 'a');
  std::thread second(write, 'b');
  while (running > 0) {
    const auto text = agreement.read();
    EXPECT_EQ(text.find_first_not_of(text.empty() ? 'a' : text.front()), std::string::npos) << text;
  }
  first.join();
  second.join();
  EXPECT_EQ(agreement.num_writes(), 40'000u);
  EXPECT_EQ(agreement.read().size(), 100u);
}

}  // namespace
}  // namespace ddpx::health
