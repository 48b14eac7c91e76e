// How ranks find their hosts, in both starts.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fake_store.h"
#include "health/host_channel.h"

namespace ddpx::health {
namespace {

using Stage = HostTable::Stage;

// Ranks that claim the same machine. They can open the pages of ranks with the same letter.
class Machine {
 public:
  explicit Machine(std::string letters) : letters_(std::move(letters)) {
    const auto size = static_cast<int>(letters_.size());
    for (int rank = 0; rank < size; ++rank) {
      auto* memory = std::calloc(1, HostTable::num_bytes(size));
      pages_.emplace_back(static_cast<HostTable*>(memory), std::free);
      introductions_.push_back({rank, "host", {"machine", 1, 1}, 1, token_of(rank)});
    }
    for (const auto& own : introductions_) {
      channels_.push_back(
          std::make_unique<HostChannel>(
              HostChannel::Settings{own, size}, std::make_shared<Probe>(*this, own.rank), [this] {
                return ++now_ns_;
              }));
    }
  }

  static uint64_t token_of(int rank) {
    return 100 + static_cast<uint64_t>(rank);
  }
  HostChannel& operator[](int rank) {
    return *channels_[static_cast<std::size_t>(rank)];
  }
  void introduce(int rank) {
    (*this)[rank].introduce(store_);
  }
  // A keeper looks which ranks have come.
  void step(int rank) {
    (*this)[rank].step(store_);
  }
  // The collective call. Returns the hosts of the ranks.
  std::vector<uint64_t> meet() {
    std::vector<uint64_t> hosts;
    for (const auto& channel : channels_) {
      hosts.push_back(channel->find_host(introductions_));
    }
    for (const auto& channel : channels_) {
      channel->meet(introductions_, hosts);
    }
    return hosts;
  }

 private:
  class Probe final : public HostProbe {
   public:
    Probe(Machine& machine, int rank) : machine_(machine), rank_(rank) {}

    std::shared_ptr<HostTable> open(const Introduction& rank) override {
      const auto& letters = machine_.letters_;
      const auto other = static_cast<std::size_t>(rank.rank);
      const bool opens = letters[static_cast<std::size_t>(rank_)] == letters[other];
      return opens ? machine_.pages_[other] : nullptr;
    }
    bool lives(int) override {
      return true;
    }
    std::string describe_lost(const std::vector<int>&, int64_t) override {
      return {};
    }
    std::string calls() override {
      return {};
    }
    std::optional<std::string> compare_calls(int, const std::string&) override {
      return std::nullopt;
    }

   private:
    Machine& machine_;
    const int rank_;
  };

  const std::string letters_;
  int64_t now_ns_ = 0;
  std::vector<std::shared_ptr<HostTable>> pages_;
  std::vector<Introduction> introductions_;
  FakeConnection store_{std::make_shared<FakeStore>()};
  std::vector<std::unique_ptr<HostChannel>> channels_;
};

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

// Rank 0 was late: it introduced itself to nobody before the collective call.
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
