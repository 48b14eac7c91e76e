// Failures among live ranks. The ranks are threads.
#include <gtest/gtest.h>

#include "ranks.h"

namespace ddpx::shm {
namespace {

// The error that `work` throws.
template <class Work>
Error caught(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorKind::kSystem, "no error");
}

Call sum_of(std::vector<float>& data, ReduceOp op = ReduceOp::kSum) {
  return all_reduce_call(data.data(), data.data(), data.size(), DType::kFloat32, op);
}

TEST(MismatchTest, NamesBothOperationsOnAllRanks) {
  run_threads(3, [](const Rank& rank) {
    std::vector<float> data(rank.rank == 2 ? 11 : 10);
    const auto error = caught([&] { rank.group.run(sum_of(data)); });
    EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
    EXPECT_TRUE(contains(error.what(), "rank 0 called all_reduce #0 (SUM of 10 float32"))
        << error.what();
    EXPECT_TRUE(contains(error.what(), "rank 2 called all_reduce #0 (SUM of 11 float32"))
        << error.what();
    EXPECT_EQ(error.culprit(), 2);
    const auto again = caught([&] { rank.group.run(barrier_call()); });
    EXPECT_EQ(again.kind(), ErrorKind::kMismatch);
  });
}

TEST(MismatchTest, OfKindsDTypesAndOps) {
  const std::vector<std::function<Call(std::vector<float>&)>> others = {
      [](auto&) { return barrier_call(); },
      [](auto& data) { return broadcast_call(data.data(), data.size(), DType::kFloat32, 0); },
      [](auto& data) { return sum_of(data, ReduceOp::kMax); },
      [](auto& data) {
        return all_reduce_call(
            data.data(), data.data(), data.size(), DType::kInt32, ReduceOp::kSum);
      }};
  for (const auto& other : others) {
    run_threads(2, [&](const Rank& rank) {
      std::vector<float> data(2000);
      const auto error =
          caught([&] { rank.group.run(rank.rank == 0 ? sum_of(data) : other(data)); });
      EXPECT_EQ(error.kind(), ErrorKind::kMismatch) << error.what();
    });
  }
}

TEST(TimeoutTest, NamesTheRanksThatDidNotArrive) {
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  run_threads(4, [&](const Rank& rank) {
    if (rank.rank == 1 || rank.rank == 3) {
      while (ended.load() < 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      // Late ranks get the same failure: the group is no longer usable.
      const auto late = caught([&] { rank.group.run(barrier_call()); });
      EXPECT_EQ(late.kind(), ErrorKind::kTimeout) << late.what();
      return;
    }
    auto call = barrier_call();
    call.timeout = std::chrono::milliseconds(1500);
    for (++begun; begun.load() < 2;) {  // otherwise the second waiting rank could be late, too
      std::this_thread::yield();
    }
    const auto error = caught([&] { rank.group.run(call); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(contains(error.what(), "barrier #0 timed out after 1500 ms: ranks 1 and 3"))
        << error.what();
    ++ended;
  });
}

TEST(LeavingTest, IsNoticedByThoseWhoWait) {
  run_threads(2, [](const Rank& rank) {
    rank.group.run(barrier_call());
    if (rank.rank == 0) {
      const auto error = caught([&] { rank.group.run(barrier_call()); });
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
      EXPECT_TRUE(contains(error.what(), "rank 1 left the group")) << error.what();
    }
  });
}

// A rank that sleeps in a wait is woken, and does not sleep until its next poll for dead peers.
TEST(LeavingTest, WakesThoseWhoSleep) {
  auto shortest = Seconds::max();
  for (int round = 0; round < 5; ++round) {
    Clock::time_point left;
    run_threads(2, [&](const Rank& rank) {
      rank.group.run(barrier_call());
      if (rank.rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(15));
        left = Clock::now();
        rank.group.leave();
        return;
      }
      EXPECT_EQ(caught([&] { rank.group.run(barrier_call()); }).kind(), ErrorKind::kPeerLost);
      shortest = std::min(shortest, Seconds(Clock::now() - left));
    });
  }
  EXPECT_LT(shortest.count(), 0.05);  // the poll interval is 0.1 s
}

TEST(LeavingTest, DoesNotDisturbWhoHasAllItNeeds) {
  for (int round = 0; round < 20; ++round) {
    run_threads(3, [](const Rank& rank) {
      std::vector<float> small(10, 1.0f);
      std::vector<float> large(5000, 1.0f);
      rank.group.run(sum_of(large));
      rank.group.run(sum_of(small));
      EXPECT_EQ(small[0], 3.0f);
    });
  }
}

TEST(LeavingTest, EndsWhatIsSubmitted) {
  run_threads(2, [](const Rank& rank) {
    if (rank.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return;
    }
    MemoryChannel channel;
    std::vector<float> data(10);
    std::atomic<int> ended{0};
    std::optional<OperationHandle> handle;
    {
      // A separate group of one rank, which leaves with pending operations.
      Group alone(channel, 0, 1, test_options(), nullptr);
      handle = alone.submit(sum_of(data), [&](std::exception_ptr) { ++ended; });
      alone.submit(barrier_call(), [&](std::exception_ptr) { ++ended; });
    }
    EXPECT_EQ(ended.load(), 2);
    EXPECT_TRUE(handle->wait_for(std::chrono::milliseconds(0)));
  });
}

TEST(LeavingTest, WithoutPeersThatNeverCome) {
  run_threads(2, [](const Rank& rank) {
    std::vector<float> data(10);
    if (rank.rank == 0) {
      // Destroyed at the end of this function, while the group's thread waits for rank 1.
      rank.group.submit(sum_of(data), [](std::exception_ptr error) { EXPECT_TRUE(error); });
      rank.group.submit(barrier_call(), [](std::exception_ptr error) { EXPECT_TRUE(error); });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
  });
}

TEST(OtherMeansTest, AFailureOfOneRankIsHeardByAll) {
  std::atomic<int> num_ready{0};
  std::atomic<int> num_failed{0};
  run_threads(3, [&](const Rank& rank) {
    rank.group.run(barrier_call());
    EXPECT_FALSE(rank.group.failure("gather").has_value());
    ++num_ready;
    while (num_ready.load() < 3) {
      std::this_thread::yield();
    }
    if (rank.rank == 1) {
      const auto own = rank.group.fail({ErrorKind::kPeerLost, "rank 2 is gone", 2}, "gather");
      EXPECT_STREQ(own.what(), "[ddpx shm rank 1, phase gather] rank 2 is gone");
      ++num_failed;
    }
    while (num_failed.load() == 0) {
      std::this_thread::yield();
    }
    const auto failure = rank.group.failure("gather");
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->culprit(), 2);
    const auto later = rank.group.fail({ErrorKind::kTimeout, "too late", 0}, "reduce");
    EXPECT_TRUE(contains(later.what(), "phase reduce] rank 2 is gone")) << later.what();
    EXPECT_EQ(caught([&] { rank.group.run(barrier_call()); }).kind(), ErrorKind::kPeerLost);
  });
}

TEST(AbortTest, EndsAllWithItsReason) {
  run_threads(3, [](const Rank& rank) {
    if (rank.rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      rank.group.abort("told to by a test");
      return;
    }
    const auto error = caught([&] { rank.group.run(barrier_call()); });
    EXPECT_EQ(error.kind(), ErrorKind::kAborted);
    EXPECT_TRUE(contains(error.what(), "rank 2 aborted the group: told to by a test"))
        << error.what();
  });
}

TEST(MisuseTest, IsRefusedAtOnceAndTheGroupGoesOn) {
  run_threads(2, [](const Rank& rank) {
    std::vector<int32_t> data(10, 1);
    const auto refused = [&](const Call& call) {
      return caught([&] { rank.group.submit(call); }).kind() == ErrorKind::kMisuse;
    };
    EXPECT_TRUE(
        refused(all_reduce_call(data.data(), data.data(), 10, DType::kInt32, ReduceOp::kAvg)));
    EXPECT_TRUE(refused(all_reduce_call(nullptr, data.data(), 10, DType::kInt32, ReduceOp::kSum)));
    EXPECT_TRUE(refused(broadcast_call(data.data(), 10, DType::kInt32, 2)));
    rank.group.run(all_reduce_call(data.data(), data.data(), 10, DType::kInt32, ReduceOp::kSum));
    EXPECT_EQ(data[0], 2);
  });
}

TEST(CorruptionTest, AnUnknownKindOfFailureIsASystemError) {
  FirstFailure first{};
  ASSERT_TRUE(record_failure(first, static_cast<ErrorKind>(1000), "a text", -1000));
  EXPECT_FALSE(record_failure(first, ErrorKind::kTimeout, "another text", 1));
  const auto failure = read_failure(first);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kSystem);
  EXPECT_EQ(failure->culprit, -1);
  EXPECT_EQ(failure->text, "a text");
}

// Peers receive a location of a buffer that does not lie in the segment.
TEST(CorruptionTest, ABufferOutsideItsSegmentIsAnError) {
  MemoryChannel channel;
  const auto options = test_options();
  Arena arena;
  auto* block = arena.allocate(1000);
  const auto location = *arena.locate(block, 1000);
  const auto no_check = [] {};
  std::thread owner([&] {
    Peers peers(run_rendezvous(channel, 1, 2, {options.sizes, kInTime, ""}), 1);
    peers.announce(arena, location.segment, no_check);
  });
  Peers peers(run_rendezvous(channel, 0, 2, {options.sizes, kInTime, ""}), 0);
  EXPECT_EQ(peers.locate(1, {location.segment, location.offset}, 1000, no_check), block);
  const auto segment_bytes = arena.resident_bytes();
  for (const auto offset : {segment_bytes - 999, segment_bytes + 1, ~std::size_t{0} - 10}) {
    const auto error = caught([&] { peers.locate(1, {location.segment, offset}, 1000, no_check); });
    EXPECT_EQ(error.kind(), ErrorKind::kSystem) << offset;
    EXPECT_EQ(error.culprit(), 1);
  }
  owner.join();
  arena.free(block);
}

// Several threads of a rank submit and wait at the same time.
TEST(ThreadsTest, ManyThreadsOfOneRank) {
  run_threads(2, [](const Rank& rank) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 30; ++round) {
          std::vector<float> data(100, 1.0f);
          if (round % 2 == 0) {
            rank.group.run(sum_of(data));
          } else {
            rank.group.submit(sum_of(data)).wait();
          }
          EXPECT_EQ(data[0], 2.0f);
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  });
}

}  // namespace
}  // namespace ddpx::shm
