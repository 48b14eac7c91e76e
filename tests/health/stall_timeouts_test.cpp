// When a rank that waits says so.
#include <gtest/gtest.h>

#include "health/stall_timeouts.h"

namespace ddpx::health {
namespace {

using Due = StallTimer::Due;
constexpr int64_t kSecond = 1'000'000'000;

TEST(StallTimerTest, WarningsComeLessAndLessOften) {
  StallTimeouts timeouts;
  timeouts.warn_ns = 10 * kSecond;
  StallTimer watch;
  const int64_t start = 5 * kSecond;
  std::vector<int64_t> warned;
  for (int64_t second = 0; second <= 100; ++second) {
    if (watch.look(start, second * kSecond, timeouts) == Due::kWarning) {
      warned.push_back(second);
    }
  }
  EXPECT_EQ(warned, (std::vector<int64_t>{10, 20, 40, 80}));
  EXPECT_EQ(watch.look(0, 0, timeouts), Due::kOver);
  EXPECT_EQ(watch.last_wait_ns(), 100 * kSecond);
  EXPECT_EQ(watch.look(0, 0, timeouts), Due::kNothing);
}

TEST(StallTimerTest, EachWaitBeginsAnew) {
  StallTimeouts timeouts;
  timeouts.warn_ns = 10 * kSecond;
  StallTimer watch;
  for (int64_t wait = 1; wait <= 5; ++wait) {
    EXPECT_EQ(watch.look(wait * 9 * kSecond, 8 * kSecond, timeouts), Due::kNothing);
  }
}

TEST(StallTimerTest, ItEndsIfThatIsWanted) {
  StallTimeouts timeouts;
  timeouts.warn_ns = 2 * kSecond;
  timeouts.raise_ns = 3 * kSecond;
  StallTimer watch;
  EXPECT_EQ(watch.look(1, 2 * kSecond, timeouts), Due::kWarning);
  EXPECT_EQ(watch.look(1, 3 * kSecond, timeouts), Due::kGiveUp);
}

TEST(StallTimerTest, WhatIsNotGivenUpIsWarnedOf) {
  StallTimeouts timeouts;
  timeouts.warn_ns = 2 * kSecond;
  timeouts.raise_ns = kSecond;
  StallTimer watch;
  std::vector<int64_t> warned;
  for (int64_t second = 1; second <= 10; ++second) {
    EXPECT_EQ(watch.look(1, second * kSecond, timeouts), Due::kGiveUp);
    if (watch.look_on(second * kSecond, timeouts) == Due::kWarning) {
      warned.push_back(second);
    }
  }
  EXPECT_EQ(warned, (std::vector<int64_t>{2, 4, 8}));
}

}  // namespace
}  // namespace ddpx::health
