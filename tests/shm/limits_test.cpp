// Limits of memory and CPU time, read from a directory that stands for the root of the file system.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "channels.h"
#include "os/limits.h"
#include "shm/spin_policy.h"

namespace ddpx::shm {
namespace {

class LimitsTest : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const auto file = directory_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string root() const {
    return directory_.path().string();
  }

  TemporaryDirectory directory_;
};

os::CpuLimits limits_of(const std::vector<int>& cores, uint64_t quota_group = 0, double quota = 0) {
  os::CpuLimits limits{};
  for (const int core : cores) {
    CPU_SET(core, &limits.cores);
  }
  limits.quota_group = quota_group;
  limits.quota_cores = quota;
  return limits;
}

bool spins(const std::vector<os::CpuLimits>& local_ranks, int own_index = 0) {
  return choose_spin_policy(local_ranks, own_index).spin.count() > 0;
}

TEST(SpinPolicyTest, RanksThatAreBoundToOneCoreEachSpin) {
  EXPECT_TRUE(spins({limits_of({0}), limits_of({1}), limits_of({5})}));
  EXPECT_FALSE(spins({limits_of({0}), limits_of({1}), limits_of({1})}));
}

TEST(SpinPolicyTest, RanksThatShareAllCores) {
  EXPECT_TRUE(spins({limits_of({0, 1}), limits_of({0, 1})}));
  EXPECT_FALSE(spins({limits_of({0, 1}), limits_of({0, 1}), limits_of({0, 1})}));
}

TEST(SpinPolicyTest, ThrottledRanksDoNotSpin) {
  const auto throttled = limits_of({0, 1, 2, 3}, 7, 1.5);
  EXPECT_FALSE(spins({throttled, throttled}));
  // A rank with a quota of its own has a core of its own.
  EXPECT_TRUE(spins({throttled, limits_of({0, 1, 2, 3}, 8, 1.0)}));
  EXPECT_TRUE(spins({limits_of({0, 1}), throttled}, 1));
}

TEST(CpuLimitsTest, TheAffinityMaskIsThatOfTheCallingThread) {
  std::thread([] {
    const auto all = os::cpu_limits().cores;
    int core = 0;
    while (!CPU_ISSET(core, &all)) {
      ++core;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const auto limits = os::cpu_limits();
    EXPECT_TRUE(CPU_EQUAL(&limits.cores, &one));
  }).join();
}

TEST_F(LimitsTest, TheSmallestQuotaOfVersion2Counts) {
  write("proc/self/cgroup", "0::/pod/rank\n");
  write("sys/fs/cgroup/pod/rank/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/pod/cpu.max", "250000 100000\n");
  write("sys/fs/cgroup/cpu.max", "800000 100000\n");
  const auto limits = os::cpu_limits(root());
  EXPECT_EQ(limits.quota_cores, 2.5);
  EXPECT_NE(limits.quota_group, 0u);
}

TEST_F(LimitsTest, QuotaOfVersion1) {
  write("proc/self/cgroup", "3:cpuset:/\n1:cpu,cpuacct:/pod\n");
  write("sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "50000\n");
  write("sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(os::cpu_limits(root()).quota_cores, 0.5);
}

TEST_F(LimitsTest, NoQuota) {
  write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(os::cpu_limits(root()).quota_group, 0u);
}

TEST_F(LimitsTest, MemoryOfVersion2) {
  write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n");
  EXPECT_EQ(os::available_memory(root()).num_bytes, 4000u * 1024);
  write("proc/self/cgroup", "0::/pod\n");
  write("sys/fs/cgroup/pod/memory.max", "1000000\n");
  write("sys/fs/cgroup/pod/memory.current", "700000\n");
  write("sys/fs/cgroup/pod/memory.stat", "anon 5\nactive_file 3\ninactive_file 200000\n");
  EXPECT_EQ(os::available_memory(root()).num_bytes, 500'000u);
  write("sys/fs/cgroup/pod/memory.max", "max\n");
  EXPECT_EQ(os::available_memory(root()).num_bytes, 4000u * 1024);
}

TEST_F(LimitsTest, MemoryOfVersion1) {
  write("proc/self/cgroup", "5:devices:/\n4:memory:/pod\n");
  write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "2000\n");
  EXPECT_EQ(os::available_memory(root()).num_bytes, 0u);
}

}  // namespace
}  // namespace ddpx::shm
