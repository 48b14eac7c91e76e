// Ranks that made different numbers of forwards, and wait for each other.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "health/calls/uneven_waits.h"
#include "health/machine/page.h"
#include "health/times.h"
#include "health/verdict/peer_table.h"

namespace ddpx::health {
namespace {

// Rank 0 synchronizes buffers for the fifth time, before step 3 of wrapper 1. Rank 1 has begun four
// synchronizations, and waits for a bucket of this step. Both have waited for long enough.
class UnevenForwards : public testing::Test {
 protected:
  UnevenForwards() {
    const auto introduction = Introduction::own(1, "", theirs_.fd(), theirs_.view().token.load());
    peers_.add(std::make_shared<Peer>(introduction, os::this_process(), ours_.host()));
    ours_.view().num_syncs = 5;
    theirs_.view().num_syncs = 4;
  }

  void SetUp() override {
    ASSERT_NE(peers_.peer(1)->page(), nullptr);
  }

  std::optional<Failure> find() {
    ours_.view().current.store(our_activity);
    theirs_.view().current.store(their_activity);
    return find_uneven_forwards(peers_, ours_.view());
  }

  // Whether the ranks wait for each other after a change of what they publish.
  bool found_after(const std::function<void()>& change) {
    const auto ours = our_activity;
    const auto theirs = their_activity;
    change();
    const bool found = find().has_value();
    our_activity = ours;
    their_activity = theirs;
    return found;
  }

  OwnPage ours_{1, /*world_size=*/2};
  OwnPage theirs_{2, /*world_size=*/2};
  PeerTable peers_{0, 2};

  const int64_t long_ago_ns = now_ns() - times::kUnevenForwards;
  Activity our_activity{
      .doing = Doing::kBuffers, .model = 1, .bucket = 0, .step = 3, .since_ns = long_ago_ns};
  Activity their_activity{
      .doing = Doing::kWaiting, .model = 1, .bucket = 2, .step = 3, .since_ns = long_ago_ns};
};

TEST_F(UnevenForwards, AreFoundByTheRankWithMore) {
  const auto failure = find();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kForwards);
  EXPECT_TRUE(failure->lost.empty());
  EXPECT_EQ(
      failure->how,
      "rank 0 has begun 1 more forward than rank 1 by step 3: rank 0 waits for the buffers of "
      "another forward, and rank 1 waits for the gradients of rank 0");
  theirs_.view().num_syncs = 2;
  EXPECT_EQ(find()->how.rfind("rank 0 has begun 3 more forwards than rank 1", 0), 0u);
}

TEST_F(UnevenForwards, NeedMoreSynchronizations) {
  theirs_.view().num_syncs = 5;
  EXPECT_FALSE(find()) << "rank 0 waits for rank 1, which comes to this forward later";
  theirs_.view().num_syncs = 6;
  EXPECT_FALSE(find());
}

TEST_F(UnevenForwards, NeedTwoWaitsOfSomeDuration) {
  EXPECT_FALSE(found_after([&] { our_activity.since_ns = now_ns(); }));
  EXPECT_FALSE(found_after([&] { their_activity.since_ns = now_ns(); }));
  EXPECT_FALSE(found_after([&] { our_activity.doing = Doing::kForward; }));
  EXPECT_FALSE(found_after([&] { their_activity.doing = Doing::kBackward; }));
  EXPECT_TRUE(found_after([] {}));
}

TEST_F(UnevenForwards, AreOfOneStepOfOneWrapper) {
  EXPECT_FALSE(found_after([&] { their_activity.step = 2; }));
  EXPECT_FALSE(found_after([&] { their_activity.model = 0; }));
  EXPECT_FALSE(found_after([&] { our_activity.bucket = 1; })) << "the step has launched a bucket";
  for (const auto model : {kNoModel, kNotNumbered}) {
    EXPECT_FALSE(found_after([&] { our_activity.model = their_activity.model = model; }));
  }
  EXPECT_TRUE(found_after([] {}));
}

}  // namespace
}  // namespace ddpx::health
