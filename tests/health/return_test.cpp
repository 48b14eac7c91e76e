// A host that comes back after its lease has ended.
#include <gtest/gtest.h>

#include "machine.h"

namespace ddpx::health {
namespace {

// Rank 0 was stopped for longer than its lease. Rank 1 is on another host.
struct Returned : Machine {
  Returned() : Machine("AB") {
    meet();
    for (const int rank : {0, 1, 0, 1, 0, 1}) {
      pass(kSecond / 10);
      step(rank);
    }
    pass(2 * kSecond);
    step(1);  // rank 0 does not read this message before it returns
    pass(20 * kSecond);
    work(0);
  }
  // Makes all requests that are due.
  void work(int rank) {
    for (int turn = 0; turn < 4; ++turn) {
      step(rank);
    }
  }
  bool has_lease(int rank) {
    return now_ns() - (*this)[rank].table()->renewed_ns < 15 * kSecond;
  }
};

TEST(ReturnTest, AMessageFromBeforeTheReturnRenewsNoLease) {
  Returned ranks;
  EXPECT_FALSE(ranks.has_lease(0));
}

TEST(ReturnTest, AnAnswerToTheRequestRenewsTheLease) {
  Returned ranks;
  ranks.listen(1);
  ranks.work(1);
  ranks.pass(kSecond);
  ranks.work(0);
  EXPECT_TRUE(ranks.has_lease(0));
  EXPECT_FALSE(ranks[0].table()->declared());
}

TEST(ReturnTest, AHostThatDoesNotAnswerIsLost) {
  Returned ranks;
  for (int turn = 0; turn < 20; ++turn) {
    ranks.pass(kSecond / 2);
    ranks.work(0);
  }
  EXPECT_EQ(ranks[0].table()->declared(), "lost: 1");
}

TEST(ReturnTest, AFailureThatAnotherHostDeclaredMeanwhileComesFirst) {
  for (const bool leaves : {false, true}) {
    Returned ranks;
    ranks[1].table()->declare("lost: 0");
    ranks.listen(1);
    leaves ? ranks.leave(1) : ranks.step(1);
    ranks.pass(kSecond);
    ranks.work(0);
    EXPECT_EQ(ranks[0].table()->declared(), "lost: 0") << leaves;
    EXPECT_FALSE(ranks.has_lease(0)) << leaves;
  }
}

}  // namespace
}  // namespace ddpx::health
