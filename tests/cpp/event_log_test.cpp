#include "observe/event_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace ddpx {
namespace {

TEST(EventLog, GivesBackWhatWasAdded) {
  EventLog log(4);
  log.add_at(7, EventKind::kGradArrived, 3, 12);
  log.add_at(5, EventKind::kLaunched, 4, 0);
  const auto events = log.read();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].time_ns, 7);
  EXPECT_EQ(events[0].step, 3u);
  EXPECT_EQ(events[0].index, 12);
  EXPECT_EQ(events[0].kind, EventKind::kGradArrived);
  EXPECT_EQ(events[1].kind, EventKind::kLaunched);
}

TEST(EventLog, KeepsTheNewest) {
  EventLog log(3);
  ASSERT_EQ(log.capacity(), 4u);
  for (std::size_t i = 0; i < 11; ++i) {
    log.add_at(static_cast<int64_t>(i), EventKind::kGradArrived, 0, i);
  }
  EXPECT_EQ(log.num_added(), 11u);
  std::vector<int> indices;
  for (const auto& event : log.read()) {
    indices.push_back(event.index);
  }
  EXPECT_EQ(indices, (std::vector<int>{7, 8, 9, 10}));
}

TEST(EventLog, TimesAreThoseOfTheCall) {
  EventLog log(1);
  const auto before = steady_now();
  log.add(EventKind::kPhase, 0, 0);
  const auto after = steady_now();
  EXPECT_LE(before, log.read()[0].time_ns);
  EXPECT_GE(after, log.read()[0].time_ns);
}

bool all_agree(const std::vector<Event>& events) {
  return std::all_of(events.begin(), events.end(), [](const Event& event) {
    return event.time_ns == event.index && event.step == static_cast<uint32_t>(event.index);
  });
}

// Each event has the number of its thread in three members, so a mixture of two events is visible.
// The main thread reads meanwhile. In the small ring, threads often write the same place at the
// same time.
class EventLogThreads : public testing::TestWithParam<std::size_t> {};

TEST_P(EventLogThreads, NoMixtures) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEvents = 200'000;
  EventLog log(GetParam());
  std::atomic<std::size_t> running{kThreads};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&log, &running, t] {
      for (std::size_t i = 0; i < kEvents; ++i) {
        log.add_at(static_cast<int64_t>(t), EventKind::kGradArrived, static_cast<uint32_t>(t), t);
      }
      --running;
    });
  }
  while (running > 0) {
    EXPECT_TRUE(all_agree(log.read()));
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(log.num_added(), kThreads * kEvents);
  // A place that a thread was still writing a round later lacks the later event.
  auto events = log.read();
  EXPECT_GE(events.size() + kThreads, log.capacity());
  EXPECT_TRUE(all_agree(events));
  for (std::size_t i = 0; i < log.capacity(); ++i) {
    log.add_at(0, EventKind::kGradArrived, 0, 0);
  }
  events = log.read();
  EXPECT_EQ(events.size(), log.capacity());
  EXPECT_TRUE(all_agree(events));
}

INSTANTIATE_TEST_SUITE_P(, EventLogThreads, testing::Values(1, 4, 1 << 10));

}  // namespace
}  // namespace ddpx
