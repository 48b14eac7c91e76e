// Ranks as processes: operations, several hosts, new and deleted segments, deaths.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <numeric>

#include "os/limits.h"
#include "ranks.h"

namespace ddpx::shm {
namespace {

template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void reduce_ones(const Rank& rank, float* data, std::size_t count) {
  std::fill_n(data, count, 1.0f);
  rank.group.run(all_reduce_call(data, data, count, DType::kFloat32, ReduceOp::kSum));
}

bool all_are(const float* data, std::size_t count, float value) {
  return std::all_of(data, data + count, [&](float element) { return element == value; });
}

TEST(ProcessesTest, ReduceInPlaceAndStaged) {
  const auto outcomes = run_processes(3, [](const Rank& rank) -> std::string {
    // Each round makes a new segment: peers must map it, and unmap the previous one.
    for (int round = 0; round < 40; ++round) {
      const std::size_t count = 300'000 + static_cast<std::size_t>(round);
      auto* resident = static_cast<float*>(rank.arena->allocate(count * sizeof(float)));
      std::vector<float> staged(count);
      reduce_ones(rank, resident, count);
      reduce_ones(rank, staged.data(), count);
      const bool right = all_are(resident, count, 3) && all_are(staged.data(), count, 3);
      rank.arena->free(resident);
      if (!right) {
        return "wrong result";
      }
    }
    return "fine";
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.text, "fine");
  }
}

TEST(ProcessesTest, MoreRanksThanCores) {
  const auto outcomes = run_processes(8, [](const Rank& rank) -> std::string {
    std::vector<float> data(5000);
    for (int round = 0; round < 20; ++round) {
      reduce_ones(rank, data.data(), data.size());
      if (!all_are(data.data(), data.size(), 8)) {
        return "wrong result";
      }
    }
    return "fine";
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.text, "fine");
  }
}

// Host identities 0, 1, 0, 1, ... stand for two hosts.
TEST(ProcessesTest, TwoHostsAreGroupedAndWorkApart) {
  const TemporaryDirectory directory;
  std::vector<std::thread> threads;
  MemoryChannel channel;
  std::vector<std::string> results(5);
  for (int rank = 0; rank < 5; ++rank) {
    threads.emplace_back([&, rank] {
      auto options = test_options();
      options.host_identity = "host" + std::to_string(rank % 2);
      Group group(channel, rank, 5, options, nullptr);
      float value = 1;
      group.run(all_reduce_call(&value, &value, 1, DType::kFloat32, ReduceOp::kSum));
      results[rank] = std::to_string(group.topology().hosts.size()) + " hosts, local " +
                      std::to_string(group.topology().local_rank_of[rank]) + " of " +
                      std::to_string(group.topology().local_ranks(rank).size()) + ", sum " +
                      std::to_string(static_cast<int>(value));
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(results[0], "2 hosts, local 0 of 3, sum 3");
  EXPECT_EQ(results[1], "2 hosts, local 0 of 2, sum 2");
  EXPECT_EQ(results[4], "2 hosts, local 2 of 3, sum 3");
}

// Kills rank 1 before an operation that the other ranks have called.
void expect_death_is_noticed(std::size_t count, int operations_before) {
  const auto outcomes = run_processes(3, [&](const Rank& rank) -> std::string {
    std::vector<float> data(count);
    for (int i = 0; i < operations_before; ++i) {
      reduce_ones(rank, data.data(), count);
    }
    if (rank.rank == 1) {
      kill(getpid(), SIGKILL);
    }
    const auto begin = Clock::now();
    const auto text = error_of([&] { reduce_ones(rank, data.data(), count); });
    const auto seconds = Seconds(Clock::now() - begin).count();
    const auto again = error_of([&] { rank.group.run(barrier_call()); });
    return (seconds < 5 ? "in time: " : "too late: ") + text + " | " + again;
  });
  EXPECT_TRUE(outcomes[1].killed);
  for (const int rank : {0, 2}) {
    const auto& text = outcomes[rank].text;
    EXPECT_TRUE(contains(text, "in time: [ddpx shm rank " + std::to_string(rank))) << text;
    EXPECT_TRUE(contains(text, "rank 1 died")) << text;
    EXPECT_TRUE(contains(text.substr(text.find(" | ")), "rank 1 died")) << text;
  }
}

TEST(FaultsTest, ADeadRankIsNamedInSmallOperations) {
  expect_death_is_noticed(10, 3);
}

TEST(FaultsTest, ADeadRankIsNamedInLargeOperations) {
  expect_death_is_noticed(100'000, 2);
}

TEST(FaultsTest, ARankThatDiesAmidOperationsIsNamed) {
  const auto outcomes = run_processes(2, [](const Rank& rank) -> std::string {
    std::vector<float> data(200'000);
    if (rank.rank == 1) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        kill(getpid(), SIGKILL);
      }).detach();
    }
    return error_of([&] {
      while (true) {
        reduce_ones(rank, data.data(), data.size());
      }
    });
  });
  EXPECT_TRUE(outcomes[1].killed);
  EXPECT_TRUE(contains(outcomes[0].text, "rank 1 died")) << outcomes[0].text;
}

// A child of the dead rank holds the rank's sockets open.
TEST(FaultsTest, AChildOfADeadRankDoesNotHideItsDeath) {
  const auto outcomes = run_processes(2, [](const Rank& rank) -> std::string {
    if (rank.rank == 1) {
      if (fork() == 0) {
        close(0);
        sleep(4);
        _exit(0);
      }
      kill(getpid(), SIGKILL);
    }
    const auto begin = Clock::now();
    const auto text = error_of([&] { rank.group.run(barrier_call()); });
    return (Seconds(Clock::now() - begin).count() < 3.5 ? "in time: " : "too late: ") + text;
  });
  EXPECT_TRUE(contains(outcomes[0].text, "in time: ")) << outcomes[0].text;
  EXPECT_TRUE(contains(outcomes[0].text, "rank 1 died")) << outcomes[0].text;
}

TEST(FaultsTest, ExitIsNoticedToo) {
  const auto outcomes = run_processes(2, [](const Rank& rank) -> std::string {
    if (rank.rank == 1) {
      _exit(3);
    }
    return error_of([&] { rank.group.run(barrier_call()); });
  });
  EXPECT_TRUE(contains(outcomes[0].text, "rank 1 died")) << outcomes[0].text;
}

TEST(FaultsTest, NothingIsLeftInDevShm) {
  const auto count = [] {
    std::error_code ignored;
    const std::filesystem::directory_iterator files("/dev/shm", ignored);
    // Files of other programs do not count.
    return std::count_if(begin(files), end(files), [](const auto& file) {
      return contains(file.path().filename().string(), "ddpx");
    });
  };
  const auto before = count();
  run_processes(2, [](const Rank& rank) -> std::string {
    auto* data = static_cast<float*>(rank.arena->allocate(4 << 20));
    reduce_ones(rank, data, 1 << 20);
    kill(getpid(), SIGKILL);
    return "";
  });
  EXPECT_EQ(count(), before);
}

// A forked child, such as a worker of a data loader, may destroy its copy of the group.
TEST(ForkTest, AChildLeavesTheGroupAlone) {
  const auto outcomes = run_processes(2, [](const Rank& rank) -> std::string {
    std::vector<float> data(1000);
    rank.group.submit(barrier_call()).wait();  // starts the thread
    const auto child = fork();
    if (child == 0) {
      rank.group.~Group();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    reduce_ones(rank, data.data(), data.size());
    return WIFEXITED(status) && all_are(data.data(), data.size(), 2) ? "fine" : "wrong";
  });
  EXPECT_EQ(outcomes[0].text, "fine");
  EXPECT_EQ(outcomes[1].text, "fine");
}

// A call of the child would take the place of its parent.
TEST(ForkTest, AChildMakesNoCall) {
  const auto outcomes = run_processes(2, [](const Rank& rank) -> std::string {
    std::vector<float> data(1000);
    reduce_ones(rank, data.data(), data.size());
    const auto child = fork();
    if (child == 0) {
      try {
        rank.group.run(barrier_call());
      } catch (const Error& error) {
        rank.group.abort("the child ends");  // no effect on the parent
        _exit(error.kind() == ErrorKind::kMisuse ? 0 : 1);
      }
      _exit(2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    reduce_ones(rank, data.data(), data.size());
    const bool refused = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return refused && all_are(data.data(), data.size(), 2) ? "fine" : "wrong";
  });
  EXPECT_EQ(outcomes[0].text, "fine");
  EXPECT_EQ(outcomes[1].text, "fine");
}

}  // namespace
}  // namespace ddpx::shm
