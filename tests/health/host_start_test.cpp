// The hosts of ranks, after a start in a collective call or through the store.
#include <gtest/gtest.h>

#include <vector>

#include "machine.h"

namespace ddpx::health {
namespace {

using Stage = HostTable::Stage;

TEST(HostStartTest, InACollectiveCallTheLowestRankHasTheTable) {
  Machine ranks("AAA");
  EXPECT_EQ(ranks.meet(), std::vector<uint64_t>(3, Machine::token_of(0)));
  EXPECT_EQ(ranks[2].table()->stage, Stage::kOneHost);
  EXPECT_FALSE(ranks[2].must_introduce());
}

TEST(HostStartTest, ThroughTheStoreTheFirstRankHasTheTable) {
  Machine ranks("AAA");
  for (const int rank : {2, 0, 1}) {
    ranks.introduce(rank);
    EXPECT_EQ(ranks[rank].table()->host, Machine::token_of(2));
  }
  ranks.step(2);
  EXPECT_EQ(ranks[0].table()->stage, Stage::kOneHost);
}

TEST(HostStartTest, RanksThatCannotOpenEachOthersPagesHaveDifferentHosts) {
  const auto a = Machine::token_of(0);
  const auto b = Machine::token_of(1);
  Machine together("ABAB");
  EXPECT_EQ(together.meet(), (std::vector<uint64_t>{a, b, a, b}));
  EXPECT_EQ(together[0].table()->stage, Stage::kManyHosts);

  Machine through_store("ABAB");
  for (const int rank : {0, 1, 2, 3}) {
    through_store.introduce(rank);
    EXPECT_EQ(through_store[rank].table()->host, rank % 2 == 0 ? a : b);
  }
  through_store.step(0);
  through_store.step(1);
  EXPECT_EQ(through_store[0].table()->stage, Stage::kManyHosts);
  EXPECT_EQ(through_store[3].table()->rank(2).host, a);
}

// Rank 0 is late, and has not introduced itself before the collective call.
TEST(HostStartTest, ARankThatComesLateJoinsTheHostThatOtherRanksHaveFoundThroughTheStore) {
  Machine ranks("AAA");
  ranks.introduce(2);
  ranks.introduce(1);
  ranks.step(2);
  EXPECT_EQ(ranks[1].table()->stage, Stage::kGathering);
  EXPECT_TRUE(ranks[0].must_introduce());
  EXPECT_EQ(ranks.meet(), std::vector<uint64_t>(3, Machine::token_of(2)));
  EXPECT_EQ(ranks[0].table(), ranks[2].table());
  EXPECT_EQ(ranks[1].table()->stage, Stage::kOneHost);
}

// The second part of the collective call failed.
TEST(HostStartTest, AHostOfTheCollectiveCallStandsInAStartThroughTheStore) {
  Machine ranks("AAB");
  const auto found = ranks[1].find_host({{0, "host", {"machine", 1, 1}, 1, Machine::token_of(0)}});
  EXPECT_EQ(found, Machine::token_of(0));
  EXPECT_TRUE(ranks[1].must_introduce());
  for (const int rank : {1, 2, 0}) {
    ranks.introduce(rank);
  }
  EXPECT_EQ(ranks[0].table(), ranks[1].table());
  EXPECT_NE(ranks[2].table(), ranks[1].table());
  ranks.step(1);
  EXPECT_EQ(ranks[1].table()->stage, Stage::kManyHosts);
  EXPECT_EQ(ranks[0].table()->rank(2).host, Machine::token_of(2));
}

}  // namespace
}  // namespace ddpx::health
