// Hosts that watch each other, with a clock that tests set.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "machine.h"

namespace ddpx::health {
namespace {

// Lets the keepers work for a time.
void work(Machine& ranks, const std::vector<int>& keepers, int seconds) {
  for (int half = 0; half < 2 * seconds; ++half) {
    ranks.pass(kSecond / 2);
    for (const int keeper : keepers) {
      ranks.step(keeper);
      ranks.step(keeper);
    }
  }
}

TEST(RingTest, AHostThatIsCutOffForAMomentIsNotLostWithAnother) {
  Machine ranks("ABC");
  ranks.meet();
  work(ranks, {0, 1, 2}, 5);
  work(ranks, {0, 2}, 8);  // host 1 is lost
  work(ranks, {0}, 9);     // host 2 is silent
  EXPECT_EQ(ranks[0].table()->declared(), "lost: 1");
}

TEST(RingTest, HostsThatAreLostAtOnceAreReportedTogether) {
  Machine ranks("ABC");
  ranks.meet();
  work(ranks, {0, 1, 2}, 5);
  work(ranks, {0}, 17);
  EXPECT_EQ(ranks[0].table()->declared(), "lost: 1 2");
}

// Ranks are dealt out to twelve hosts. The second rank of a host watches the same hosts as the
// first one.
TEST(RingTest, AnotherKeeperWatchesTheSameHosts) {
  for (const int keeper : {1, 13}) {
    Machine ranks("ABCDEFGHIJKLABCDEFGHIJKL");
    ranks.meet();
    std::vector<int> keepers;
    for (int rank = 0; rank < 12; ++rank) {
      keepers.push_back(rank == 1 ? keeper : rank);
    }
    work(ranks, keepers, 5);
    ranks.clear_reads();
    work(ranks, {keeper}, 2);
    EXPECT_TRUE(ranks.has_read(10)) << keeper;
    EXPECT_FALSE(ranks.has_read(0)) << keeper;
  }
}

TEST(RingTest, AnUnknownActivityStaysUnknownOnOtherHosts) {
  Machine ranks("ABB");
  ranks.meet();
  ranks[1].table()->rank(1).activity.store(
      {.doing = Doing::kBackward, .step = 3, .since_ns = ranks.now_ns()});
  work(ranks, {0, 1}, 5);
  const auto known = ranks[0].table()->rank(1).activity.known();
  EXPECT_TRUE(known && known->step == 3);
  EXPECT_FALSE(ranks[0].table()->rank(2).activity.known());
}

}  // namespace
}  // namespace ddpx::health
