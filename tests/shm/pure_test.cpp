// Pure functions: topology, order of summation, texts.
#include <gtest/gtest.h>

#include "shm/chunk_order.h"
#include "shm/error.h"
#include "shm/topology.h"

namespace ddpx::shm {
namespace {

using Hosts = std::vector<std::vector<int>>;

TEST(TopologyTest, AllOnOneHost) {
  const auto topology = group_by_id({"a", "a", "a"});
  EXPECT_EQ(topology.hosts, (Hosts{{0, 1, 2}}));
  EXPECT_EQ(topology.local_rank_of, (std::vector<int>{0, 1, 2}));
}

TEST(TopologyTest, InterleavedHosts) {
  const auto topology = group_by_id({"b", "a", "b", "a"});
  EXPECT_EQ(topology.hosts, (Hosts{{0, 2}, {1, 3}}));
  EXPECT_EQ(topology.host_of, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(topology.local_ranks(3), (std::vector<int>{1, 3}));
}

// Chunk c: g[c-1], g[c-2], ..., g[c].
TEST(ChunkOrderTest, AsGloosRing) {
  const ChunkOrder order(Order::kGloo, 3, 600, 4);
  EXPECT_EQ(order.ranks(0), (std::vector<int>{2, 1, 0}));
  EXPECT_EQ(order.run_end(0), 200u);
  EXPECT_EQ(order.ranks(200), (std::vector<int>{0, 2, 1}));
  EXPECT_EQ(order.ranks(599), (std::vector<int>{1, 0, 2}));
  EXPECT_GE(order.run_end(599), 600u);
}

TEST(ChunkOrderTest, FewElementsAreAllInTheFirstChunks) {
  // 5 elements, 6 segments of 1: two segments make a chunk.
  const ChunkOrder order(Order::kGloo, 3, 5, 4);
  EXPECT_EQ(order.run_end(0), 2u);
  EXPECT_EQ(order.ranks(4), (std::vector<int>{1, 0, 2}));
}

TEST(ChunkOrderTest, LargeBuffersAreCutIntoSegmentsOfAtMostOneMebibyte) {
  // 7 MiB and 3 ranks: 9 segments of 7/9 MiB, rounded up to whole floats; 3 of them make a chunk.
  const std::size_t count = (7u << 20) / 4;
  const ChunkOrder order(Order::kGloo, 3, count, 4);
  const std::size_t segment_bytes = ((7u << 20) + 8) / 9;
  EXPECT_EQ(order.run_end(0), 3 * ((segment_bytes + 3) / 4));
}

TEST(ChunkOrderTest, FixedIsTheSameForEveryElement) {
  const ChunkOrder order(Order::kFixed, 4, 1'000'000, 4);
  EXPECT_EQ(order.ranks(999'999), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_GE(order.run_end(0), 1'000'000u);
}

TEST(ErrorTest, OpeningsAreTakenOff) {
  EXPECT_EQ(without_opening(opening("rank 3", "all_reduce #1") + "no [x] y"), "no [x] y");
  EXPECT_EQ(without_opening("[ddpx shm] no memory"), "no memory");
  EXPECT_EQ(without_opening("no [x] y"), "no [x] y");
}

TEST(ErrorTest, ListsRanks) {
  EXPECT_EQ(list_ranks({3}), "rank 3");
  EXPECT_EQ(list_ranks({1, 2, 5}), "ranks 1, 2 and 5");
}

}  // namespace
}  // namespace ddpx::shm
