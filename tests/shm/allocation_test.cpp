// Allocations that fail inside operations. For each allocation that can fail: no rank reports a
// wrong result as a success, no rank waits for long, and the process does not terminate.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>

#include "failing_new.h"
#include "no_threads.h"
#include "ranks.h"

namespace ddpx::shm {
namespace {

using Which = FailingNew::Which;

constexpr int kNumRanks = 3;
constexpr auto kTimeout = std::chrono::seconds(20);

enum class Way { kOneShot, kResident, kStaged };

// Where the allocations fail: in `run`, in the first `submit`, or on the group's own thread.
enum class Place { kRun, kSubmit, kOwnThread };

struct AllocationSetting {
  Kind kind;
  Way way;
  Place place;
  int victim;
};

// The outcome of one operation on one rank.
struct Outcome {
  bool error = false;
  bool right = false;
  std::optional<ErrorKind> kind;  // set for errors of the transport
  std::string text;
};

// The buffers of one rank for one operation.
class Operation {
 public:
  Operation(const Rank& rank, const AllocationSetting& setting)
      : rank_(rank), kind_(setting.kind), arena_(rank.arena) {
    count_ = setting.way == Way::kOneShot ? 20 : 1500;
    const auto length = count_ * kNumRanks;
    if (setting.way == Way::kResident) {
      input_ = static_cast<float*>(arena_->allocate(length * sizeof(float)));
    } else {
      private_.resize(length);
      input_ = private_.data();
      arena_.reset();
    }
    output_.resize(length);
  }
  ~Operation() {
    if (arena_) {
      arena_->free(input_);
    }
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // All elements of a buffer are equal. They differ between ranks and between calls.
  Call call(int round) {
    round_ = round;
    std::fill(input_, input_ + count_ * kNumRanks, value_of(rank_.rank));
    std::fill(output_.begin(), output_.end(), -1.0f);
    switch (kind_) {
      case Kind::kAllReduce:
        return all_reduce_call(input_, input_, count_, DType::kFloat32, ReduceOp::kSum);
      case Kind::kBroadcast:
        return broadcast_call(input_, count_, DType::kFloat32, /*root=*/1);
      case Kind::kAllGather:
        return all_gather_call(input_, output_.data(), count_, DType::kFloat32);
      case Kind::kReduceScatter:
        return reduce_scatter_call(input_, output_.data(), count_, DType::kFloat32, ReduceOp::kSum);
      case Kind::kBarrier:
        return barrier_call();
    }
    return barrier_call();
  }

  bool right() const {
    const float sum = value_of(0) + value_of(1) + value_of(2);
    const auto all = [this](const float* data, float value) {
      return std::all_of(data, data + count_, [&](float element) { return element == value; });
    };
    switch (kind_) {
      case Kind::kAllReduce:
        return all(input_, sum);
      case Kind::kBroadcast:
        return all(input_, value_of(1));
      case Kind::kAllGather:
        return all(output_.data(), value_of(0)) && all(output_.data() + count_, value_of(1)) &&
               all(output_.data() + 2 * count_, value_of(2));
      case Kind::kReduceScatter:
        return all(output_.data(), sum);
      case Kind::kBarrier:
        return true;
    }
    return false;
  }

 private:
  float value_of(int rank) const {
    return static_cast<float>((rank + 1) * (round_ + 1));
  }

  const Rank& rank_;
  Kind kind_;
  std::shared_ptr<Arena> arena_;
  std::size_t count_ = 0;
  int round_ = 0;
  float* input_ = nullptr;
  std::vector<float> private_;
  std::vector<float> output_;
};

Outcome outcome_of(const std::function<void()>& body, const Operation& operation) {
  Outcome outcome;
  try {
    body();
    outcome.right = operation.right();
  } catch (const Error& error) {
    outcome = {true, false, error.kind(), error.what()};
  } catch (const std::exception& error) {
    outcome = {true, false, std::nullopt, error.what()};
  }
  return outcome;
}

void await(OperationHandle handle) {
  if (!handle.wait_for(2 * kTimeout)) {
    throw std::runtime_error("an operation did not end");
  }
  if (const auto error = handle.error()) {
    std::rethrow_exception(error);
  }
}

// Runs one operation in which the victim's allocations fail, and one operation after it.
struct Round {
  bool happened = false;
  std::vector<Outcome> first = std::vector<Outcome>(kNumRanks);
  std::vector<Outcome> second = std::vector<Outcome>(kNumRanks);
};

// Runs both operations on the group's own thread, since FailingNew affects the calling thread only.
// Peers wait until both are queued, so that this thread posts the second operation.
void run_on_own_thread(
    const Rank& rank,
    const Call& call,
    long nth,
    Which which,
    std::atomic<bool>& queued,
    bool& happened) {
  std::optional<FailingNew> failing;
  const auto first =
      rank.group.submit(barrier_call(), [&](std::exception_ptr) { failing.emplace(nth, which); });
  const auto second = rank.group.submit(call, [&](std::exception_ptr) {
    happened = failing->happened();
    failing.reset();
  });
  queued = true;
  await(first);
  await(second);
}

void run_on_this_thread(
    const Rank& rank, Place place, const Call& call, long nth, Which which, bool& happened) {
  rank.group.run(barrier_call());
  auto copy = call;
  std::optional<OperationHandle> handle;
  std::exception_ptr error;
  {
    const FailingNew failing(nth, which);
    try {
      if (place == Place::kRun) {
        rank.group.run(std::move(copy));
      } else {
        handle = rank.group.submit(std::move(copy));
      }
    } catch (...) {
      error = std::current_exception();
    }
    happened = failing.happened();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  if (handle) {
    await(*handle);
  }
}

Round run_round(const AllocationSetting& setting, long nth, Which which) {
  Round round;
  auto options = test_options();
  options.timeout = kTimeout;
  std::atomic<int> num_through{0};
  std::atomic<bool> queued{setting.place != Place::kOwnThread};
  run_threads(
      kNumRanks,
      [&](const Rank& rank) {
        // The second operation has its own buffers: a peer may still use those of a failed one.
        Operation first(rank, setting);
        Operation second(rank, setting);
        const auto index = static_cast<std::size_t>(rank.rank);
        const auto call = first.call(0);
        round.first[index] = outcome_of(
            [&] {
              if (rank.rank != setting.victim) {
                while (!queued.load()) {
                  std::this_thread::sleep_for(std::chrono::microseconds(100));
                }
                rank.group.run(barrier_call());
                rank.group.run(call);
              } else if (setting.place == Place::kOwnThread) {
                run_on_own_thread(rank, call, nth, which, queued, round.happened);
              } else {
                run_on_this_thread(rank, setting.place, call, nth, which, round.happened);
              }
            },
            first);
        // A script that catches the error and continues makes the next call.
        const auto next = second.call(1);
        round.second[index] = outcome_of([&] { rank.group.run(next); }, second);
        for (++num_through; num_through.load() < kNumRanks;) {  // a rank that left counts as lost
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
      },
      options);
  return round;
}

void check(const Round& round, int victim) {
  const auto v = static_cast<std::size_t>(victim);
  bool any_error = false;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    for (const auto* outcome : {&round.first[rank], &round.second[rank]}) {
      EXPECT_TRUE(outcome->error || outcome->right) << "rank " << rank << ": a wrong result";
      if (outcome->error && rank != v) {
        EXPECT_EQ(outcome->kind, ErrorKind::kOutOfMemory) << outcome->text;
        const auto culprit = "rank " + std::to_string(victim) + ": no memory was left";
        EXPECT_NE(outcome->text.find(culprit), std::string::npos) << outcome->text;
      }
      any_error = any_error || outcome->error;
    }
  }
  EXPECT_EQ(any_error, round.first[v].error);
  if (any_error) {
    EXPECT_TRUE(round.happened);
    for (const auto& outcome : round.second) {
      EXPECT_TRUE(outcome.error) << "the group went on";
    }
  }
}

class AllocationTest : public testing::TestWithParam<AllocationSetting> {};

TEST_P(AllocationTest, WhicheverFailsNoResultIsWrong) {
  for (const auto which : {Which::kOne, Which::kAllFrom}) {
    bool happened = true;
    for (long nth = 1; happened; ++nth) {
      SCOPED_TRACE("allocation " + std::to_string(nth));
      const auto begin = std::chrono::steady_clock::now();
      const auto round = run_round(GetParam(), nth, which);
      check(round, GetParam().victim);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout);
      happened = round.happened;
      if (HasFailure()) {
        return;
      }
    }
  }
}

std::vector<AllocationSetting> settings() {
  std::vector<AllocationSetting> all;
  for (const auto place : {Place::kRun, Place::kSubmit, Place::kOwnThread}) {
    for (const auto way : {Way::kOneShot, Way::kResident, Way::kStaged}) {
      for (const auto kind :
           {Kind::kAllReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter}) {
        all.push_back({kind, way, place, /*victim=*/1});
      }
    }
    all.push_back({Kind::kBarrier, Way::kOneShot, place, /*victim=*/0});
    all.push_back({Kind::kAllReduce, Way::kResident, place, /*victim=*/0});
  }
  return all;
}

std::string name_of_allocation(const testing::TestParamInfo<AllocationSetting>& info) {
  constexpr const char* kWays[] = {"one_shot", "resident", "staged"};
  constexpr const char* kPlaces[] = {"run", "submit", "own_thread"};
  const auto& setting = info.param;
  return std::string(name_of(setting.kind)) + "_" + kWays[static_cast<int>(setting.way)] + "_" +
         kPlaces[static_cast<int>(setting.place)] + "_victim_" + std::to_string(setting.victim);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, AllocationTest, testing::ValuesIn(settings()), name_of_allocation);

// ---- the group's own thread ------------------------------------------------------------------

TEST(ThreadTest, OneThatCannotBeStartedFailsTheGroup) {
  run_threads(2, [&](const Rank& rank) {
    std::vector<float> data(10, 1.0f);
    const auto call =
        all_reduce_call(data.data(), data.data(), 10, DType::kFloat32, ReduceOp::kSum);
    std::string text;
    ErrorKind kind{};
    try {
      // Rank 1 may fail while rank 0 still waits in the barrier.
      rank.group.run(barrier_call());
      if (rank.rank == 1) {
        const NoThreads none;
        rank.group.submit(call);
      } else {
        rank.group.run(call);
      }
    } catch (const Error& error) {
      text = error.what();
      kind = error.kind();
    }
    EXPECT_EQ(kind, ErrorKind::kSystem);
    EXPECT_NE(text.find("rank 1: "), std::string::npos) << text;
    EXPECT_THROW(rank.group.run(call), Error);
  });
}

TEST(LeavingWithoutMemoryTest, EndsWhatIsPending) {
  run_threads(2, [](const Rank& rank) {
    rank.group.run(barrier_call());
    if (rank.rank == 1) {
      return;
    }
    std::atomic<int> num_errors{0};
    const auto count = [&](std::exception_ptr error) { num_errors += error ? 1 : 0; };
    auto never = barrier_call();
    rank.group.submit(never, count);
    rank.group.submit(never, count);
    {
      const FailingNew failing(1, Which::kAllFrom);
      rank.group.leave();
    }
    EXPECT_EQ(num_errors.load(), 2);
  });
}

// ---- the arena --------------------------------------------------------------------------------

TEST(ArenaWithoutMemoryTest, FreesBlocks) {
  Arena arena;
  std::vector<void*> blocks;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(arena.allocate(1000));
  }
  const auto before = arena.resident_bytes();
  {
    const FailingNew failing(1, Which::kAllFrom);
    for (const std::size_t i :
         {1u, 3u, 5u, 2u, 0u, 4u}) {  // free ranges that grow, and some that do not
      arena.free(blocks[i]);
    }
  }
  void* whole = arena.allocate(6 * 1024);
  EXPECT_EQ(whole, blocks[0]);  // the free ranges have been merged
  EXPECT_EQ(arena.resident_bytes(), before);
  arena.free(whole);
}

TEST(ArenaWithoutMemoryTest, ABlockThatCannotBeHadCostsNothing) {
  for (const std::size_t num_bytes : {std::size_t{100}, std::size_t{8} << 20}) {
    bool happened = true;
    for (long nth = 1; happened; ++nth) {
      Arena arena;
      void* block = nullptr;
      {
        const FailingNew failing(nth);
        try {
          block = arena.allocate(num_bytes);
        } catch (const std::bad_alloc&) {
        }
        happened = failing.happened();
      }
      if (block == nullptr) {
        EXPECT_EQ(arena.resident_bytes(), 0u);
      } else {
        arena.free(block);
      }
    }
  }
}

}  // namespace
}  // namespace ddpx::shm
