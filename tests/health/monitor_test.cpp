// Monitors of several ranks, with their threads.
#include "health/monitor.h"

#include <gtest/gtest.h>

#include "health/calls/call_comparison.h"
#include "health/machine/peer.h"
#include "health/machine/record.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

TEST(MonitorTest, AnExceptionReachesRanksOfTheSameMachine) {
  Ranks ranks("AAA");
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  for (const std::size_t rank : {0, 2}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank].failed(); }));
    EXPECT_TRUE(eventually([&] { return ranks.num_aborts(rank) == 1; }));
    const auto text = error_of([&] { ranks[rank].raise_if_failed(); });
    EXPECT_TRUE(contains(text, "rank 1 (host ")) << text;
    EXPECT_TRUE(contains(text, "(ValueError: no)")) << text;
  }
}

TEST(MonitorTest, AGroupIsAbortedEvenIfNothingCanBeLogged) {
  Ranks ranks("AA");
  LogQueue::instance().set_reader([]() -> bool { throw std::bad_alloc(); });
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  EXPECT_TRUE(eventually([&] { return ranks.num_aborts(0) == 1; }));
  LogQueue::instance().set_reader(nullptr);
}

// The waiting rank may try to read the page after the process has ended.
TEST(MonitorTest, AnExceptionReachesRanksThatHaveNotMetTheRank) {
  const auto store = std::make_shared<FakeStore>();
  const auto waits = watch(group_of(0, 2), access_to(store));
  const auto late = watch(group_of(1, 2), access_to(store));
  late->fail("ValueError: no", Monitor::delivery_deadline());
  EXPECT_TRUE(store->has("ddpx/health/event/0"));
  ASSERT_TRUE(eventually([&] { return waits->failed(); }));
  EXPECT_EQ(waits->report()->failure.lost.front().cause, "ValueError: no");
}

TEST(MonitorTest, ARankThatComesLaterLearnsOfAnException) {
  const auto store = std::make_shared<FakeStore>();
  {
    const auto early = watch(group_of(1, 2), access_to(store));
    early->fail("ValueError: no", Monitor::delivery_deadline());
  }
  const auto late = watch(group_of(0, 2), access_to(store));
  ASSERT_TRUE(eventually([&] { return late->failed(); }));
  EXPECT_EQ(late->report()->failure.lost.front().cause, "ValueError: no");
}

TEST(MonitorTest, AllHostsReportAFailureOfOneHost) {
  Ranks ranks("AABB");
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  for (const std::size_t rank : {0, 2, 3}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank].failed(); })) << rank;
    EXPECT_EQ(ranks[rank].report()->failure.lost.front().rank, 1);
    EXPECT_EQ(ranks[rank].report()->failure.lost.front().cause, "ValueError: no");
  }
}

TEST(MonitorTest, ARankThatEndsBecauseOfAFailurePostsItFirst) {
  Ranks ranks("AAB");
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  const auto start = std::chrono::steady_clock::now();
  ranks[0].fail("RankFailure", Monitor::delivery_deadline());
  ranks.await_delivery(0);
  // Other hosts have had time to read the failure. With rank 0, the store would now be lost.
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(400));
  ASSERT_TRUE(eventually([&] { return ranks[2].failed(); }));
  EXPECT_EQ(ranks[2].report()->failure.lost.front().rank, 1);
}

TEST(MonitorTest, OtherHostsReportRankZeroIfTheStoreIsLost) {
  Ranks ranks("AB");
  ranks.store->lose();
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of([&] { ranks[1].explain_error("broken"); });
  // Without the store, no message of another rank can arrive.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2500));
  EXPECT_TRUE(contains(text, "rank 0 (host ")) << text;
  EXPECT_TRUE(contains(text, "the store is gone")) << text;
}

TEST(MonitorTest, TheReportOfAnotherRankIsNotQuoted) {
  Ranks ranks("AB");
  ranks.store->lose();
  const auto text = error_of([&] { ranks[1].explain_error("broken"); });
  EXPECT_TRUE(contains(text, "The backend said: broken")) << text;
  const std::string other = "[ddpx shm rank 1, phase all_reduce #1] [ddpx rank 0, step 2] late";
  const auto again = error_of([&] { ranks[1].explain_error(other); });
  EXPECT_TRUE(contains(again, "rank 0 (host ")) << again;
  EXPECT_FALSE(contains(again, "The backend said")) << again;
}

TEST(MonitorTest, ABrokenConnectionIsNoEndOfTheStore) {
  Ranks ranks("AB");
  ranks.store->break_connections();
  ranks[1].page().publish({.doing = Doing::kWaiting, .step = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(2000));
  EXPECT_LT(ranks[1].state().channel->store_state(), StoreState::kLost) << "it connects anew";
  EXPECT_FALSE(ranks[1].failed());
}

TEST(MonitorTest, OtherHostsReportRankZeroIfTheStoreHangs) {
  Ranks ranks("ABC");
  EXPECT_EQ(
      error_of([&] { ranks[1].explain_error("broken"); }),
      "no error");  // messages of all ranks have arrived
  ranks.store->hang();
  const auto text = error_of([&] { ranks[1].explain_error("broken"); });
  EXPECT_TRUE(contains(text, "rank 0 (host ")) << text;
  EXPECT_FALSE(contains(text, "rank 2")) << text;
  ranks.store->lose();
}

TEST(MonitorTest, IfTheStoreHangsBeforeRanksHaveMetOnlyRankZeroIsNamed) {
  const auto store = std::make_shared<FakeStore>();
  store->hang();
  const auto monitor = watch(group_of(1, 3), access_to(store));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto text = error_of([&] { monitor->explain_error("broken"); });
  EXPECT_TRUE(contains(text, "rank 0 (host unknown")) << text;
  EXPECT_FALSE(contains(text, "rank 2")) << text;
  store->lose();
}

TEST(MonitorTest, AStoreThatIsSlowBeforeRanksHaveMetIsWaitedFor) {
  const auto store = std::make_shared<FakeStore>();
  store->hang();
  const auto first = watch(group_of(0, 2), access_to(store));
  const auto second = watch(group_of(1, 2), access_to(store));
  std::thread slow([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    store->answer();
  });
  EXPECT_EQ(error_of([&] { second->explain_error("broken"); }), "no error");
  EXPECT_TRUE(second->peers().peer(0)) << "they have met";
  slow.join();
}

// The store answers rank 1 before rank 0, which could not introduce itself before.
TEST(MonitorTest, AfterAStoreWasSlowOthersHaveTimeToIntroduceThemselves) {
  const auto store = std::make_shared<FakeStore>();
  store->hang();
  const auto second = watch(group_of(1, 2), access_to(store));
  std::shared_ptr<Monitor> first;
  std::thread slow([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    store->answer();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    first = watch(group_of(0, 2), access_to(store));
  });
  EXPECT_EQ(error_of([&] { second->explain_error("broken"); }), "no error");
  EXPECT_TRUE(second->peers().peer(0)) << "they have met";
  slow.join();
}

TEST(MonitorTest, ARankThatNeverIntroducesItselfIsNamedThoughTheStoreIsAlwaysSlow) {
  const auto store = std::make_shared<FakeStore>();
  store->delay_ms = 400;
  const auto monitor = watch(group_of(0, 2), access_to(store));
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of([&] { monitor->explain_error("broken"); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  EXPECT_TRUE(contains(text, "rank 1 (host unknown")) << text;
}

// Messages of the ranks are late, too.
TEST(MonitorTest, RanksThatLiveAreNotBlamedThoughTheStoreIsAlwaysSlow) {
  const auto store = std::make_shared<FakeStore>();
  const auto first = watch(group_of(0, 3, "A"), access_to(store));
  const auto far = watch(group_of(1, 3, "B"), access_to(store));
  ASSERT_TRUE(eventually([&] { return store->has("ddpx/health/count"); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  store->delay_ms = 500;
  const auto text = error_of([&] { first->explain_error("broken"); });
  EXPECT_TRUE(contains(text, "rank 2 (host unknown")) << text;
  EXPECT_FALSE(contains(text, "rank 1")) << text;
}

TEST(MonitorTest, AFailureWhileTheStoreHangsIsPostedLater) {
  const auto store = std::make_shared<FakeStore>();
  store->hang();
  const auto waits = watch(group_of(1, 2), access_to(store));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const auto text = error_of([&] { waits->explain_error("broken"); });
  EXPECT_TRUE(contains(text, "rank 0 (host unknown")) << text;
  store->answer();
  const auto late = watch(group_of(0, 2), access_to(store));
  ASSERT_TRUE(eventually([&] { return late->failed(); }));
  EXPECT_EQ(late->report()->failure.first_rank(), 0);
}

TEST(MonitorTest, IfTheStoreEndsBeforeRanksHaveMetWaitsEndSoon) {
  const auto store = std::make_shared<FakeStore>();
  store->hang();
  const auto waits = watch(group_of(1, 3), access_to(store));
  const auto computes = watch(group_of(2, 3), access_to(store));
  waits->page().begin_construction();
  waits->page().begin_call();
  std::this_thread::sleep_for(std::chrono::milliseconds(3500));
  EXPECT_FALSE(waits->failed()) << "though the store may only be slow";
  store->lose();
  ASSERT_TRUE(eventually([&] { return waits->failed(); }, 5));
  EXPECT_EQ(waits->report()->failure.lost.size(), 1);
  EXPECT_EQ(waits->report()->failure.first_rank(), 0);
  EXPECT_FALSE(computes->failed());
}

TEST(MonitorTest, ALostStoreDoesNotMatterOnOneMachine) {
  Ranks ranks("AA");
  ranks.store->lose();
  EXPECT_EQ(error_of([&] { ranks[1].explain_error("broken"); }), "no error");
  EXPECT_FALSE(ranks[0].failed());
}

TEST(MonitorTest, RanksOfAHostTakeOverTheFailureOfTheFirst) {
  Ranks ranks("ABB");
  ranks.store->lose();
  error_of([&] { ranks[1].explain_error("broken"); });
  ASSERT_TRUE(ranks[1].failed());
  EXPECT_TRUE(eventually([&] { return ranks[2].failed(); }, 2));
}

TEST(MonitorTest, MalformedTextsInTheStoreAreIgnored) {
  Ranks ranks("AB");
  ranks.store->put("ddpx/health/event/0", "x:y");
  ranks.store->put("ddpx/health/event/1", encode(uint8_t{1}, std::string("x")));
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_FALSE(ranks[0].failed());
  EXPECT_FALSE(ranks[1].failed());
}

TEST(MonitorTest, TheStackOfAPeerIsReadAlsoIfThePeerFails) {
  Ranks ranks("AA");
  ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
  std::thread asked([&] {
    ranks.await_record(1, "stack_wanted");
    ranks[1].page().view().stack.write("the stack");
  });
  const auto stack = request_stack(ranks[0].peers().peer(1), 30 * times::kSecond);
  asked.join();
  ASSERT_TRUE(stack);
  EXPECT_EQ(*stack, "the stack");
  EXPECT_FALSE(request_stack(ranks[0].peers().peer(1), 50 * times::kMillisecond));
}

TEST(MonitorTest, AHostThatWritesSlowlyLivesAndOneThatIsSilentDoesNot) {
  Ranks ranks("AB");
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  auto& far = ranks[0].state().table()->rank(1);
  ASSERT_TRUE(eventually([&] { return far.heard_ns != 0; }));
  ranks.lose(1);
  std::thread writes([&] {
    for (int i = 0; i < 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3000));
      far.heard_ns = now_ns();
    }
  });
  EXPECT_EQ(error_of([&] { ranks[0].explain_error("broken"); }), "no error");
  writes.join();
  const auto text = error_of([&] { ranks[0].explain_error("broken"); });
  EXPECT_TRUE(contains(text, "rank 1 (host ")) << text;
  EXPECT_TRUE(contains(text, "has not been heard of for ")) << text;
}

TEST(MonitorTest, AStoreThatAnswersAfterThreeSecondsIsNotLost) {
  Ranks ranks("AB");
  ranks[1].page().publish({.doing = Doing::kWaiting, .step = 3});
  ranks.store->delay_ms = 3000;
  EXPECT_EQ(error_of([&] { ranks[1].explain_error("broken"); }), "no error");
  ranks.store->delay_ms = 0;
}

TEST(MonitorTest, ARankThatHasDoneItsPartMayLeave) {
  Ranks ranks("AA");
  ranks[1].page().publish({.doing = Doing::kOutside, .step = 4});
  ranks[1].leave();
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
  EXPECT_FALSE(ranks[0].failed());
  ranks[0].page().publish({.doing = Doing::kWaiting, .step = 5});
  EXPECT_TRUE(eventually([&] { return ranks[0].failed(); }));
  EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kLeft);
}

TEST(MonitorTest, ManyThreadsLookAtOnce) {
  Ranks ranks("AAB");
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&ranks, rank] {
      for (uint32_t step = 0; step < 500; ++step) {
        ranks[rank].page().publish({.doing = Doing::kWaiting, .step = step});
        const StepCalls calls{0, step, 1, 7, 0, 0};
        ranks[rank].page().view().calls.publish(calls);
        EXPECT_EQ(compare(ranks[rank].peers(), calls, /*is_over=*/true), Comparison::kSame);
        ranks[rank].report();
      }
      if (rank == 1) {
        ranks[rank].fail("ValueError: no", Monitor::delivery_deadline());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(eventually([&] { return ranks[0].failed() && ranks[2].failed(); }));
}

}  // namespace
}  // namespace ddpx::health
