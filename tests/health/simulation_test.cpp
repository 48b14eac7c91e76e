// The channel between hosts, in simulated jobs.
#include "simulation.h"

#include <gtest/gtest.h>

namespace ddpx::health {
namespace {

constexpr int kNumRanks = 256;

// A job whose ranks know each other.
struct Started : Simulation {
  explicit Started(SimulationSettings settings = {kNumRanks}) : Simulation(settings) {
    run(10 * kSecond);
    EXPECT_TRUE(started_ns());
  }
};

// Seconds from now until all hosts report a failure.
double seconds_to_report(Simulation& simulation) {
  const auto start = simulation.now();
  while (!simulation.reported_ns() && simulation.now() < start + 60 * kSecond) {
    simulation.run(simulation.now() + 100 * kMillisecond);
  }
  const auto reported = simulation.reported_ns();
  return reported ? static_cast<double>(*reported - start) / kSecond : 60;
}

double requests_per_second(Simulation& simulation) {
  const auto before = simulation.num_requests();
  simulation.run(simulation.now() + 20 * kSecond);
  return static_cast<double>(simulation.num_requests() - before) / 20;
}

TEST(SimulationTest, RequestsGrowWithHosts) {
  Simulation simulation({kNumRanks});
  while (!simulation.started_ns()) {
    simulation.run(simulation.now() + 100 * kMillisecond);
  }
  EXPECT_LE(simulation.num_requests(), 4 * kNumRanks + 50 * simulation.num_hosts());
  EXPECT_LE(requests_per_second(simulation), 8 * simulation.num_hosts());
  simulation.stall(true);
  EXPECT_LE(requests_per_second(simulation), 16 * simulation.num_hosts());
  EXPECT_FALSE(simulation.reported_ns());
}

TEST(SimulationTest, RanksOfOneHostNeedNoStoreAfterTheStart) {
  Started simulation({8});
  EXPECT_EQ(requests_per_second(simulation), 0);
}

TEST(SimulationTest, AllHostsReportADeath) {
  for (const int rank : {0, 9, kNumRanks - 1}) {
    Started simulation;
    simulation.kill_rank(rank);
    EXPECT_LE(seconds_to_report(simulation), 5) << rank;
    EXPECT_EQ(simulation.reported(5), std::vector<int>{rank});
  }
}

TEST(SimulationTest, AHostIsReportedWithinTwentySeconds) {
  for (const int host : {0, 3, kNumRanks / 8 - 1}) {
    Started simulation;
    simulation.run((11 + host) * kSecond + host * 300 * kMillisecond);
    simulation.lose_host(host);
    EXPECT_LE(seconds_to_report(simulation), 20) << host;
    EXPECT_EQ(simulation.reported(5).size(), 8u);
    EXPECT_EQ(simulation.reported(5).front(), 8 * host);
    EXPECT_FALSE(simulation.reports_falsely());
  }
}

TEST(SimulationTest, EightAdjacentHostsAreReportedTogether) {
  Started simulation;
  for (int host = 6; host < 14; ++host) {
    simulation.lose_host(host);
  }
  EXPECT_LE(seconds_to_report(simulation), 20);
  EXPECT_EQ(simulation.reported(5).size(), 64u);
  EXPECT_FALSE(simulation.reports_falsely());
}

TEST(SimulationTest, AKeeperThatStopsDoesNotCondemnItsHost) {
  Started simulation;
  simulation.stop_rank(8, 60 * kSecond);
  simulation.run(simulation.now() + 120 * kSecond);
  EXPECT_FALSE(simulation.reported_ns());
  EXPECT_FALSE(simulation.reports_falsely());
}

TEST(SimulationTest, ASlowStoreIsNoFailure) {
  Started simulation;
  simulation.set_latency(3 * kSecond);
  simulation.run(simulation.now() + 600 * kSecond);
  EXPECT_FALSE(simulation.reports_falsely());
}

TEST(SimulationTest, HoursOfTrainingWithHiccups) {
  Started simulation({.num_ranks = 64, .hiccups_per_hour = 20, .look_ns = kSecond});
  simulation.run(3600 * kSecond);
  EXPECT_FALSE(simulation.reports_falsely());
}

// The simulation can fail: with this defect, a host that lives is reported.
TEST(SimulationTest, ADefectShows) {
  Started simulation({.num_ranks = kNumRanks, .dropped_host = 4});
  simulation.run(60 * kSecond);
  EXPECT_TRUE(simulation.reports_falsely());
}

}  // namespace
}  // namespace ddpx::health
