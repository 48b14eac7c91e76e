// Starts of several ranks, and the leases of their hosts.
#include <gtest/gtest.h>

#include "../shm/no_threads.h"
#include "health/monitor.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

constexpr int64_t kShortLease = 1'500'000'000;

TEST(LeaseTest, RanksOfOneHostThatMeetInACollectiveCallMakeNoRequest) {
  Ranks ranks("AAA");
  std::this_thread::sleep_for(std::chrono::milliseconds(800));
  EXPECT_EQ(ranks.store->num_requests, 0);
  EXPECT_TRUE(ranks[0].state().introduction().empty()) << "they need not meet again";
}

TEST(LeaseTest, ACollectiveCallReplacesTheStartThroughTheStore) {
  Ranks ranks("AABB", times::kLease, Start::kThroughStore);
  ranks.meet();
  EXPECT_TRUE(eventually([&] { return ranks.store->num_connections == 4; }));
  ranks[3].fail("ValueError: no", Monitor::delivery_deadline());
  for (const std::size_t rank : {0, 1, 2}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank].failed(); }, 1)) << rank;
  }
}

TEST(LeaseTest, AFailureBeforeTheCollectiveCallStands) {
  Ranks ranks("AB", times::kLease, Start::kThroughStore);
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  ranks.meet();
  EXPECT_TRUE(eventually([&] { return ranks[0].failed(); }, 1));
}

TEST(LeaseTest, OneHostNeedsNoConnectionAfterTheStart) {
  Ranks ranks("AAA", times::kLease, Start::kThroughStore);
  ASSERT_TRUE(eventually([&] { return ranks.store->num_connections == 0; }));
  const int before = ranks.store->num_requests;
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_EQ(ranks.store->num_requests, before);
}

// The limit of processes is reached for a while.
TEST(LeaseTest, ARankThatCannotStartAThreadTriesAgain) {
  const auto store = std::make_shared<FakeStore>();
  const auto first = watch(group_of(0, 2, "A"), access_to(store));
  const auto second = watch(group_of(1, 2, "B"), access_to(store));
  {
    const shm::NoThreads none;
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    EXPECT_EQ(store->num_connections, 0);
  }
  EXPECT_TRUE(eventually([&] { return second->peers().peer(0) && first->peers().peer(1); }));
}

TEST(LeaseTest, OnlyKeepersHaveConnections) {
  Ranks ranks("AAABBB");
  EXPECT_TRUE(eventually([&] { return ranks.store->num_connections == 4; }));
}

TEST(LeaseTest, AHostWithoutRanksIsLost) {
  Ranks ranks("AAB", kShortLease);
  ranks.lose(2);
  for (const std::size_t rank : {0, 1}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank].failed(); }, 5)) << rank;
    const auto failure = ranks[rank].report()->failure;
    EXPECT_EQ(failure.lost.size(), 1u);
    EXPECT_EQ(failure.first_rank(), 2);
    EXPECT_TRUE(contains(failure.lost.front().what, "has not been heard of for 1."))
        << failure.lost.front().what;
  }
}

TEST(LeaseTest, AnotherRankTakesOver) {
  Ranks ranks("AAB", kShortLease);
  ranks.lose(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(3000));
  EXPECT_FALSE(ranks[2].failed());
  EXPECT_EQ(error_of([&] { ranks[1].await_lease(); }), "no error");
}

TEST(LeaseTest, ASilentStoreIsALostHost) {
  Ranks ranks("AB", kShortLease);
  ranks.store->hang();
  ranks[1].page().publish({.doing = Doing::kWaiting, .step = 3});
  ASSERT_TRUE(eventually([&] { return ranks[1].failed(); }, 5));
  EXPECT_EQ(ranks[1].report()->failure.first_rank(), 0);
  EXPECT_TRUE(contains(ranks[1].report()->text(), "the store does not answer"));
  ranks.store->answer();
}

TEST(LeaseTest, AHostThatHasLostItsLeaseMakesNoStep) {
  Ranks ranks("AB", kShortLease);
  ranks.store->hang();
  std::this_thread::sleep_for(std::chrono::milliseconds(1700));
  const auto start = std::chrono::steady_clock::now();
  std::thread answers([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ranks.store->answer();
  });
  EXPECT_EQ(error_of([&] { ranks[1].await_lease(); }), "no error");
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(250));
  answers.join();
}

TEST(LeaseTest, TheStoreMayEndAfterRankZeroHasLeft) {
  Ranks ranks("AB");
  ranks[0].leave();
  ranks.await_delivery(0);
  ranks.store->lose();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(error_of([&] { ranks[1].await_lease(); }), "no error");
  EXPECT_FALSE(ranks[1].failed());
}

// A group of ranks 2 and 3 of the job. Rank 0 of the job serves the store, and is not in the group.
void name_ranks_2_and_3(Ranks& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].peers().name_ranks(RankNames({2, 3}));
  }
}

TEST(LeaseTest, NoRankIsBlamedForTheStoreOfAnotherGroup) {
  Ranks ranks("AB");
  name_ranks_2_and_3(ranks);
  ranks.store->lose();
  std::this_thread::sleep_for(std::chrono::milliseconds(2000));
  const auto text = error_of([&] { ranks[1].await_lease(); });
  EXPECT_TRUE(contains(text, "] the store of the process group is gone: rank 0 of the job, "))
      << text;
  EXPECT_EQ(ranks[1].report()->failure.kind, FailureKind::kDead);
  EXPECT_TRUE(ranks[1].report()->failure.lost.empty());
}

TEST(LeaseTest, OnlyTheRankThatServesTheStoreMayEndIt) {
  Ranks ranks("AB");
  name_ranks_2_and_3(ranks);
  ranks[0].leave();
  ranks.await_delivery(0);
  ranks.store->lose();
  std::this_thread::sleep_for(std::chrono::milliseconds(2000));
  EXPECT_NE(error_of([&] { ranks[1].await_lease(); }), "no error");
}

TEST(LeaseTest, ARankOfAnotherHostThatHasLeftIsNotCalledDead) {
  for (const std::size_t leaving : {1, 2}) {  // the keeper of its host, and another rank
    Ranks ranks("ABB");
    ranks[leaving].page().publish({.doing = Doing::kOutside, .step = 4});
    ranks[leaving].leave();
    ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});  // after the part of that rank
    std::this_thread::sleep_for(std::chrono::milliseconds(2000));
    EXPECT_FALSE(ranks[0].failed());
    const auto text = error_of([&] {
      ranks[0].page().publish({.doing = Doing::kWaiting, .step = 5});
      ranks[0].explain_error("Connection closed by peer");
    });
    EXPECT_TRUE(contains(text, "has left (its script ended")) << text;
    EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kLeft);
    EXPECT_EQ(ranks[0].report()->failure.first_rank(), static_cast<int>(leaving));
  }
}

TEST(LeaseTest, AHostThatHasLeftIsNotLost) {
  Ranks ranks("ABB", kShortLease);
  ranks[1].leave();
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  ranks[2].leave();
  ranks.await_delivery(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(3000));
  EXPECT_FALSE(ranks[0].failed());
  EXPECT_EQ(error_of([&] { ranks[0].await_lease(); }), "no error");
}

TEST(LeaseTest, WithoutTheStoreRanksMakeNoStep) {
  Ranks ranks("AB");
  ranks.store->lose();
  std::this_thread::sleep_for(std::chrono::milliseconds(2000));
  EXPECT_FALSE(ranks[1].failed()) << "it may not need it any more";
  const auto text = error_of([&] { ranks[1].await_lease(); });
  EXPECT_TRUE(contains(text, "rank 0 (host ")) << text;
  EXPECT_TRUE(contains(text, "the store is gone")) << text;
}

TEST(LeaseTest, ARankThatTakesOverKnowsThatTheStoreIsLost) {
  Ranks ranks("ABB");
  const auto is_lost = [&] { return ranks[2].state().channel->store_state() >= StoreState::kLost; };
  ranks.store->hang();
  ASSERT_TRUE(eventually(is_lost, 4));
  EXPECT_FALSE(eventually([&] { return !is_lost(); }, 3)) << "rank 2 takes over after 3 s";
  ranks.store->answer();
  EXPECT_TRUE(eventually([&] { return !is_lost(); }, 2));
}

}  // namespace
}  // namespace ddpx::health
