// When a rank that waits says so.
#include <gtest/gtest.h>

#include "health/patience.h"

namespace ddpx::health {
namespace {

using Due = StallWatch::Due;
constexpr int64_t kSecond = 1'000'000'000;

TEST(PatienceTest, WarningsComeLessAndLessOften) {
  Patience patience;
  patience.warn_ns = 10 * kSecond;
  StallWatch watch;
  const int64_t start = 5 * kSecond;
  std::vector<int64_t> warned;
  for (int64_t second = 0; second <= 100; ++second) {
    if (watch.look(start, second * kSecond, patience) == Due::kWarning) {
      warned.push_back(second);
    }
  }
  EXPECT_EQ(warned, (std::vector<int64_t>{10, 20, 40, 80}));
  EXPECT_EQ(watch.look(0, 0, patience), Due::kOver);
  EXPECT_EQ(watch.last_wait_ns(), 80 * kSecond);
  EXPECT_EQ(watch.look(0, 0, patience), Due::kNothing);
}

TEST(PatienceTest, EachWaitBeginsAnew) {
  Patience patience;
  patience.warn_ns = 10 * kSecond;
  StallWatch watch;
  for (int64_t wait = 1; wait <= 5; ++wait) {
    EXPECT_EQ(watch.look(wait * 9 * kSecond, 8 * kSecond, patience), Due::kNothing);
  }
}

TEST(PatienceTest, ItEndsIfThatIsWanted) {
  Patience patience;
  patience.warn_ns = 2 * kSecond;
  patience.raise_ns = 3 * kSecond;
  StallWatch watch;
  EXPECT_EQ(watch.look(1, 2 * kSecond, patience), Due::kWarning);
  EXPECT_EQ(watch.look(1, 3 * kSecond, patience), Due::kGiveUp);
}

TEST(PatienceTest, WhatIsNotGivenUpIsWarnedOf) {
  Patience patience;
  patience.warn_ns = 2 * kSecond;
  patience.raise_ns = kSecond;
  StallWatch watch;
  std::vector<int64_t> warned;
  for (int64_t second = 1; second <= 10; ++second) {
    EXPECT_EQ(watch.look(1, second * kSecond, patience), Due::kGiveUp);
    if (watch.look_on(second * kSecond, patience) == Due::kWarning) {
      warned.push_back(second);
    }
  }
  EXPECT_EQ(warned, (std::vector<int64_t>{2, 4, 8}));
}

}  // namespace
}  // namespace ddpx::health
