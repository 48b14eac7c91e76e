// Buckets leave in plan order, whatever the order in which they become ready.
#include "comm/launch_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "errors.h"

namespace ddpx {
namespace {

TEST(LaunchQueue, NothingLeavesBeforeItIsReady) {
  LaunchQueue queue(2);
  EXPECT_EQ(queue.pop(), std::nullopt);
  EXPECT_FALSE(queue.empty());
}

TEST(LaunchQueue, AReadyBucketWaitsForThoseBeforeIt) {
  LaunchQueue queue(3);
  queue.mark_ready(2);
  queue.mark_ready(1);
  EXPECT_EQ(queue.pop(), std::nullopt);
  queue.mark_ready(0);
  EXPECT_EQ(queue.pop(), 0u);
  EXPECT_EQ(queue.pop(), 1u);
  EXPECT_EQ(queue.pop(), 2u);
  EXPECT_EQ(queue.pop(), std::nullopt);
  EXPECT_TRUE(queue.empty());
}

TEST(LaunchQueue, LeavesInPlanOrderForEveryReadyOrder) {
  std::vector<std::size_t> ready_order(5);
  std::iota(ready_order.begin(), ready_order.end(), 0);
  do {
    LaunchQueue queue(ready_order.size());
    std::size_t expected = 0;
    for (const auto bucket_index : ready_order) {
      queue.mark_ready(bucket_index);
      while (const auto launched = queue.pop()) {
        ASSERT_EQ(*launched, expected++);
      }
    }
    ASSERT_EQ(expected, ready_order.size());
  } while (std::next_permutation(ready_order.begin(), ready_order.end()));
}

TEST(LaunchQueue, TheLaunchingThreadTakesWhatBecomesReadyMeanwhile) {
  LaunchQueue queue(3);
  std::vector<std::size_t> launched;
  queue.mark_ready(0);
  queue.launch_ready([&](std::size_t bucket_index) {
    launched.push_back(bucket_index);
    if (bucket_index == 0) {
      queue.mark_ready(2);
      queue.mark_ready(1);
      queue.launch_ready([](std::size_t) { ADD_FAILURE() << "a second thread launches"; });
    }
    EXPECT_FALSE(queue.ended());
  });
  EXPECT_EQ(launched, (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_TRUE(queue.ended());
  EXPECT_NO_THROW(queue.rethrow_error());
}

TEST(LaunchQueue, NothingIsLaunchedAfterAnError) {
  LaunchQueue queue(2);
  queue.mark_ready(0);
  queue.mark_ready(1);
  const auto fail = [](std::size_t) { throw std::runtime_error("no peer"); };
  EXPECT_THROW(queue.launch_ready(fail), std::runtime_error);
  queue.launch_ready([](std::size_t) { ADD_FAILURE() << "launched after an error"; });
  EXPECT_THROW(queue.rethrow_error(), std::runtime_error);
  EXPECT_FALSE(queue.ended());
}

TEST(LaunchQueue, ReadyTwiceIsABug) {
  LaunchQueue queue(2);
  queue.mark_ready(1);
  EXPECT_THROW(queue.mark_ready(1), InternalError);
}

TEST(LaunchQueue, ReadyAgainAfterItLeftIsABug) {
  LaunchQueue queue(1);
  queue.mark_ready(0);
  queue.pop();
  EXPECT_THROW(queue.mark_ready(0), InternalError);
}

}  // namespace
}  // namespace ddpx
