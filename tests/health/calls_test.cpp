// The steps that ranks publish, and their comparison between hosts.
#include "health/calls/call_comparison.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "local_ranks.h"

namespace ddpx::health {
namespace {

// A step with the same calls and results on all ranks.
StepCalls sample_of(uint32_t step, uint32_t wrapper = 0) {
  return StepCalls{wrapper, step, 3, 77, 0, 1000 + step, 4096};
}

void add_steps(RecentSteps& samples, uint32_t first, uint32_t last) {
  for (auto step = first; step < last; ++step) {
    samples.publish(sample_of(step));
  }
}

bool differ(const RecentSteps& ours, const RecentSteps& theirs) {
  return ours.find_mismatch(theirs.reduced()).has_value();
}

TEST(RecentStepsTest, StepsThatBothHaveAreCompared) {
  RecentSteps ours;
  RecentSteps theirs;
  add_steps(ours, 0, 6);
  add_steps(theirs, 0, 5);
  EXPECT_FALSE(differ(ours, theirs));
  auto other = sample_of(5);
  other.results = 3;
  theirs.publish(other);
  const auto found = ours.find_mismatch(theirs.reduced());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first.step, 5);
  EXPECT_EQ(found->first.results, 1005);
  EXPECT_EQ(found->second.results, 3);
  EXPECT_EQ(found->second.num_launched, 3);
  EXPECT_EQ(found->second.num_bytes, 4096);
  EXPECT_TRUE(differ(theirs, ours)) << "each finds it";
}

TEST(RecentStepsTest, TheFirstStepThatDiffersIsFound) {
  RecentSteps ours;
  RecentSteps theirs;
  for (uint32_t step = 0; step < 20; ++step) {
    ours.publish(sample_of(step));
    auto other = sample_of(step);
    other.digest += step >= 14 ? 1 : 0;
    theirs.publish(other);
  }
  EXPECT_EQ(ours.find_mismatch(theirs.reduced())->first.step, 14);
}

// The backwards of two wrappers may run in two threads, and their steps may have the same place.
TEST(RecentStepsTest, StepsOfTwoThreadsAreNotMixed) {
  constexpr uint32_t kSteps = 200'000;
  RecentSteps steps{};
  std::atomic<int> running{2};
  const auto publish = [&steps, &running](uint32_t wrapper) {
    for (uint32_t i = 0; i < kSteps; ++i) {
      // step + 157 * wrapper is the same for both
      auto calls = sample_of(1000 + 157 * (1 - wrapper), wrapper);
      calls.digest = wrapper;
      steps.publish(calls);
    }
    --running;
  };
  std::thread first(publish, 0);
  std::thread second(publish, 1);
  int num_mixed = 0;
  while (running > 0) {
    for (uint32_t wrapper = 0; wrapper < 2; ++wrapper) {
      const auto found = steps.find(wrapper, 1000 + 157 * (1 - wrapper));
      num_mixed += found && found->digest != wrapper ? 1 : 0;
    }
  }
  first.join();
  second.join();
  EXPECT_EQ(num_mixed, 0);
  steps.publish(sample_of(1000, 1));
  EXPECT_TRUE(steps.find(1, 1000)) << "can be written afterwards";
}

TEST(FrozenParamsTest, AreFoundInTheTextOfTheirRank) {
  FrozenParams frozen{};
  const ParamIndices some{0, 1, 2, 5, 7, 8};
  const ParamIndices others{3};
  frozen.publish(1, digest_of(some), some);
  frozen.publish(2, digest_of(others), others);
  EXPECT_EQ(FrozenParams::find(frozen.encode_all(), 1, digest_of(some)), some);
  EXPECT_EQ(FrozenParams::find(frozen.encode_all(), 2, digest_of(others)), others);
  EXPECT_FALSE(FrozenParams::find(frozen.encode_all(), 1, digest_of(others)));
  EXPECT_FALSE(FrozenParams::find("7:garbage", 1, digest_of(some)));
  EXPECT_EQ(FrozenParams::find("", 1, digest_of({})), ParamIndices());
}

TEST(FrozenParamsTest, ATextThatIsTooLongHasNone) {
  FrozenParams frozen{};
  ParamIndices every_second;
  for (std::size_t param = 0; param < 4000; param += 2) {
    every_second.push_back(param);
  }
  frozen.publish(1, digest_of(every_second), every_second);
  EXPECT_EQ(frozen.encode_all(), "");
}

TEST(MismatchTest, RanksOfOtherHostsFrozeOtherParams) {
  RecentSteps ours;
  RecentSteps theirs;
  FrozenParams frozen{};
  auto calls = sample_of(3, 1);
  calls.frozen = digest_of({0, 1});
  ours.publish(calls);
  frozen.publish(1, calls.frozen, {0, 1});
  calls.frozen = digest_of({});
  theirs.publish(calls);
  const auto found = ours.find_mismatch(theirs.reduced());
  ASSERT_TRUE(found);
  const auto failure = mismatch_of(
      {{0, found->first}, {1, found->second}},
      [&](int rank) { return rank == 0 ? frozen.encode_all() : std::string(); },
      {"a", "b", "c"});
  EXPECT_EQ(failure.kind, FailureKind::kFrozen);
  EXPECT_EQ(
      failure.how,
      "rank 1 and rank 0 froze different parameters in step 3 of wrapper 1: 'a', 'b' on rank 0 "
      "only");
}

TEST(DescribeMismatchTest, BeginsWithTheDifferenceInWords) {
  const auto text_of = [](StepCalls usual, const StepCalls& other) {
    return describe_mismatch({{0, usual}, {1, other}, {2, usual}});
  };
  auto usual = sample_of(3);
  usual.sequence = 6;
  auto other = usual;
  other.sequence = 7;
  other.results = 5;
  const auto text = text_of(usual, other);
  EXPECT_EQ(
      text.rfind("rank 1 made one more collective call than rank 0, 7 against 6, by step 3", 0), 0u)
      << text;
  EXPECT_LT(text.find("bytes in all"), text.find("Digests")) << text;
  EXPECT_EQ(text.find('\n', text.find("Digests")), std::string::npos) << "digests come last";
  EXPECT_EQ(
      text_of(other, usual).rfind("rank 1 made one fewer collective call than rank 0, 6", 0), 0u);
  other = usual;
  other.digest = 5;
  other.num_bytes = 8;
  EXPECT_EQ(
      text_of(usual, other)
          .rfind("rank 1 reduced other buckets than rank 0 in step 3, 3 buckets of 8 bytes", 0),
      0u);
  other = usual;
  other.results = 5;
  EXPECT_EQ(text_of(usual, other).rfind("rank 1 received other sums than rank 0 in step 3", 0), 0u);
}

TEST(RecentStepsTest, StepsThatBrokeOffAreNotCompared) {
  RecentSteps ours;
  RecentSteps theirs;
  ours.publish(sample_of(3));
  for (const uint64_t results : {uint64_t{0}, StepCalls::kSpoiled}) {
    auto other = sample_of(3);
    other.digest = 5;
    other.results = results;
    theirs.publish(other);
    EXPECT_FALSE(differ(ours, theirs));
    EXPECT_FALSE(differ(theirs, ours));
  }
}

// The message of another host may be 1.5 s old. This rank may have made many steps since.
TEST(RecentStepsTest, AtAnySpeedSomeStepsAreKeptByBoth) {
  for (const uint32_t ahead : {1, 5, 15, 40, 100, 300, 1000, 1500}) {
    RecentSteps ours;
    RecentSteps theirs;
    add_steps(ours, 0, 5000 + ahead);
    for (uint32_t step = 0; step < 5000; ++step) {
      auto other = sample_of(step);
      other.results = 3;
      theirs.publish(other);
    }
    EXPECT_TRUE(differ(ours, theirs)) << ahead;
  }
}

TEST(RecentStepsTest, WrappersThatTakeTurnsAreAllCompared) {
  constexpr uint32_t kNumWrappers = 20;
  constexpr uint32_t kNumSteps = 1000;
  constexpr uint32_t kAhead = 50;
  for (uint32_t odd = 0; odd < kNumWrappers; ++odd) {
    int num_found = 0;
    RecentSteps ours;
    RecentSteps theirs;
    for (uint32_t step = 0; step < kNumSteps; ++step) {
      for (uint32_t wrapper = 0; wrapper < kNumWrappers; ++wrapper) {
        ours.publish(sample_of(step, wrapper));
        if (step >= kAhead) {
          auto other = sample_of(step - kAhead, wrapper);
          other.results += wrapper == odd ? 1 : 0;
          theirs.publish(other);
        }
      }
      num_found += step % 10 == 0 && differ(ours, theirs) ? 1 : 0;
    }
    EXPECT_GE(num_found, 5) << odd << ", of " << kNumSteps / 10 << " looks";
  }
}

TEST(RecentStepsTest, RandomBytesAreNoMismatch) {
  RecentSteps ours;
  add_steps(ours, 0, 3);
  StepCalls random;
  std::memset(static_cast<void*>(&random), 0xff, sizeof(random));
  EXPECT_FALSE(ours.find_mismatch({StepCalls{}, random}));
}

// ---- among monitors ----------------------------------------------------------------------------

std::string how_of(Ranks& ranks, std::size_t rank) {
  return ranks[rank].report()->failure.how;
}

// Rank `odd` has other results than the others from step 40 on, of 100 steps.
void make_steps(Ranks& ranks, std::size_t size, std::size_t odd) {
  for (uint32_t step = 0; step < 100; ++step) {
    for (std::size_t rank = 0; rank < size; ++rank) {
      auto sample = sample_of(step);
      sample.results += rank == odd && step >= 40 ? 1 : 0;
      ranks[rank].page().view().calls.publish(sample);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST(RecentStepsTest, HostsThatMadeOtherCallsAreFound) {
  Ranks ranks("ABB");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until keepers have started
  make_steps(ranks, 3, 1);
  for (const std::size_t rank : {0, 1, 2}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank].failed(); }, 3)) << rank;
    EXPECT_EQ(ranks[rank].report()->failure.kind, FailureKind::kMismatch);
    EXPECT_EQ(how_of(ranks, rank), how_of(ranks, 0));
  }
  EXPECT_TRUE(contains(how_of(ranks, 0), "different collective calls in step "))
      << how_of(ranks, 0);
  EXPECT_TRUE(contains(how_of(ranks, 0), "\n  rank 0: 3 buckets of 4096 bytes"))
      << how_of(ranks, 0);
  EXPECT_TRUE(contains(how_of(ranks, 0), "\n  rank 1: 3 buckets")) << how_of(ranks, 0);
}

TEST(RecentStepsTest, TheSameCallsAreNoFailure) {
  Ranks ranks("AB");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  make_steps(ranks, 2, /*odd=*/2);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_FALSE(ranks[0].failed());
}

}  // namespace
}  // namespace ddpx::health
