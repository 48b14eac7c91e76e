// Buckets leave in plan order, whatever the order in which they become ready.
#include "comm/launch_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
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
