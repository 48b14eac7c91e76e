// Status pages: what a peer reads is what the owner wrote, or nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "health/page.h"
#include "health/step_tracker.h"

namespace ddpx::health {
namespace {

StepCalls calls(uint8_t model, uint32_t step, uint16_t num_launched = 1) {
  return StepCalls{model, step, num_launched, step + uint64_t{100}, 0, 0};
}

TEST(PageTest, NotesAreSeen) {
  OwnPage page(1, /*world_size=*/1);
  page.note(Doing::kWaiting, calls(2, 9, 4), 3);
  const auto seen = page.view().activity();
  EXPECT_EQ(seen.doing, Doing::kWaiting);
  EXPECT_EQ(seen.model, 2);
  EXPECT_EQ(seen.bucket, 3);
  EXPECT_EQ(seen.step, 9u);
  EXPECT_GT(seen.since_ns, 0);
  EXPECT_EQ(page.view().progress().num_launched, 4);
}

TEST(PageTest, TrailsStayForSomeSteps) {
  OwnPage page(1, /*world_size=*/1);
  for (uint32_t step = 0; step < 20; ++step) {
    page.publish(calls(0, step));
  }
  EXPECT_FALSE(page.view().calls(0, 2));
  ASSERT_TRUE(page.view().calls(0, 19));
  EXPECT_EQ(page.view().calls(0, 19)->digest, 119u);
  EXPECT_TRUE(page.view().calls(0, 5));
  EXPECT_FALSE(page.view().calls(1, 19));
}

TEST(PageTest, OnlyTheFirstEndCounts) {
  OwnPage page(1, /*world_size=*/1);
  page.fail("first", std::nullopt);
  page.fail("second", 3);
  page.leave();
  EXPECT_EQ(page.view().presence(), Presence::kFailing);
  EXPECT_EQ(page.view().layout().cause.read(), "first");
  EXPECT_EQ(page.view().layout().culprit_plus_1.load(), 0);

  OwnPage other(2, /*world_size=*/1);
  other.leave();
  EXPECT_EQ(other.view().presence(), Presence::kLeft);
  other.fail("late", 3);
  EXPECT_EQ(other.view().presence(), Presence::kFailing);
}

TEST(PageTest, WhoWasToldToEndMayStillFail) {
  OwnPage page(1, /*world_size=*/1);
  page.mark_terminated();
  page.leave();
  EXPECT_EQ(page.view().presence(), Presence::kTerminated);
  page.fail("ValueError: no", std::nullopt);
  EXPECT_EQ(page.view().presence(), Presence::kFailing);
}

TEST(PageTest, LongTextsAreCut) {
  OwnPage page(1, /*world_size=*/1);
  page.fail(std::string(5000, 'x'), std::nullopt);
  EXPECT_EQ(page.view().layout().cause.read(), std::string(2048, 'x'));
}

TEST(PageTest, TextsAreCutBetweenCharacters) {
  OwnPage page(1, /*world_size=*/1);
  std::string euros;
  for (int i = 0; i < 1000; ++i) {
    euros += "\xE2\x82\xAC";  // 3 bytes each, which do not divide 2048
  }
  page.fail(euros, std::nullopt);
  const auto cause = page.view().layout().cause.read();
  EXPECT_EQ(cause.size(), 2046u);
  EXPECT_EQ(cause, euros.substr(0, 2046));
}

TEST(PageTest, ATextIsNeverReadHalf) {
  OwnPage page(1, /*world_size=*/1);
  auto& note = page.view().layout().note;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int i = 0; !stop; ++i) {
      note.write(
          std::string(static_cast<std::size_t>(1 + i % 100), static_cast<char>('a' + i % 26)));
    }
  });
  int num_read = 0;
  for (int i = 0; i < 20'000 || num_read == 0; ++i) {
    const auto text = note.read();
    num_read += text.empty() ? 0 : 1;
    EXPECT_EQ(text.find_first_not_of(text.empty() ? 'a' : text.front()), std::string::npos);
  }
  stop = true;
  writer.join();
  EXPECT_GT(num_read, 0);
}

TEST(PageTest, TwoThreadsMayWriteAText) {
  OwnPage page(1, /*world_size=*/1);
  auto& note = page.view().layout().note;
  std::atomic<int> running{2};
  const auto write = [&](char letter) {
    for (std::size_t i = 0; i < 20'000; ++i) {
      note.write(std::string(1 + i % 100, letter));
    }
    --running;
  };
  std::thread first(write, 'a');
  std::thread second(write, 'b');
  while (running > 0) {
    const auto text = note.read();
    EXPECT_EQ(text.find_first_not_of(text.empty() ? 'a' : text.front()), std::string::npos) << text;
  }
  first.join();
  second.join();
  EXPECT_EQ(note.num_writes(), 40'000u);
  EXPECT_EQ(note.read().size(), 100u);
}

TEST(PageTest, ATrailIsNeverReadHalf) {
  OwnPage page(1, /*world_size=*/1);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint32_t step = 0; !stop; ++step) {
      page.publish(calls(0, step * PageLayout::kNumSteps + 1));  // all in one place
    }
  });
  for (int i = 0; i < 50'000; ++i) {
    const auto step = page.view().progress().step;
    const auto seen = page.view().calls(0, step);
    if (seen) {
      EXPECT_EQ(seen->digest, seen->step + 100);
    }
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace ddpx::health
