// Ranks whose calls differ, and the errors that they raise.
#include <gtest/gtest.h>

#include "health/calls/step_guard.h"
#include "health/calls/step_tracker.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

constexpr uint64_t kUsual = 7;
constexpr uint64_t kOther = 8;

// Three ranks of one machine that take steps of one bucket.
class StepsTest : public testing::Test {
 protected:
  StepsTest() {
    for (std::size_t rank = 0; rank < 3; ++rank) {
      trackers.emplace_back(ranks.shared(rank));
      guards.emplace_back(ranks.shared(rank));
    }
  }

  void begin(uint32_t step) {
    for (auto& rank : trackers) {
      rank.begin_step(step);
      rank.publish_launch(0, 64, 0);
    }
  }
  // Ends the step of a rank. `word`: the result of its bucket; nullopt without a result. Returns
  // the error of the comparison of calls.
  std::string end(std::size_t rank, std::optional<uint64_t> word) {
    if (word) {
      trackers[rank].add_result(&*word, sizeof(*word));
    }
    return error_of([this, rank] { check_calls(rank); });
  }
  void take_step(uint32_t step) {
    begin(step);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(end(rank, kUsual), "no error");
    }
  }

  void check_calls(std::size_t rank) {
    guards[rank].compare_calls(trackers[rank].publish_results(), {"a", "b", "c", "d"});
  }

  Ranks ranks{"AAA"};
  std::vector<StepTracker> trackers;
  std::vector<StepGuard> guards;
};

TEST_F(StepsTest, ARankWithOtherResultsWaitsForRanksThatHaveNotEndedTheStep) {
  take_step(0);
  begin(1);
  EXPECT_EQ(end(0, kUsual), "no error");
  std::string second;
  std::thread waits([&] { second = end(1, kOther); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto third = end(2, kUsual);
  waits.join();
  for (const auto& text : {second, third}) {
    EXPECT_TRUE(contains(text, "different collective calls in step 1")) << text;
  }
}

TEST_F(StepsTest, TheWaitEndsAndRanksCompareAgainAStepLater) {
  take_step(0);
  begin(1);
  EXPECT_EQ(end(0, kUsual), "no error");
  EXPECT_EQ(end(1, kOther), "no error");
  begin(2);
  const auto text = end(0, kUsual);
  EXPECT_TRUE(contains(text, "different collective calls in step 1")) << text;
}

TEST_F(StepsTest, RanksThatFrozeDifferentParamsAreNamed) {
  for (std::size_t rank = 0; rank < 3; ++rank) {
    trackers[rank] = StepTracker(ranks.shared(rank), {.params = {"a", "b", "c", "d"}});
    trackers[rank].number_as_constructed();
  }
  const auto take_step = [this](uint32_t step, const std::vector<ParamIndices>& frozen) {
    for (std::size_t rank = 0; rank < 3; ++rank) {
      trackers[rank].begin_step(step);
      trackers[rank].publish_frozen(frozen[rank]);
      trackers[rank].publish_launch(0, 64, 0);
    }
    return end(0, kUsual);
  };
  EXPECT_EQ(take_step(0, {{0, 1}, {0, 1}, {0, 1}}), "no error");
  EXPECT_EQ(take_step(1, {{}, {}, {}}), "no error");
  const auto text = take_step(2, {{1}, {1, 2, 3}, {1}});
  EXPECT_TRUE(contains(
      text,
      "rank 1 and rank 0 froze different parameters in step 2: 'c', 'd' on rank 1 only. A rank"))
      << text;
  EXPECT_TRUE(contains(text, "find_unused_parameters=True")) << text;
}

TEST_F(StepsTest, ARankThatPublishesNoFrozenParamsIsNotCompared) {
  begin(0);
  trackers[1].begin_step(0);
  trackers[1].publish_frozen({1});
  trackers[1].publish_launch(0, 64, 0);
  EXPECT_EQ(end(0, kUsual), "no error");
}

TEST_F(StepsTest, ARankWithoutResultsIsNotWaitedFor) {
  take_step(0);
  begin(1);
  EXPECT_EQ(end(2, std::nullopt), "no error");  // as with a communication hook
  EXPECT_EQ(end(0, kUsual), "no error");
  const auto text = end(1, kOther);
  EXPECT_TRUE(contains(text, "different collective calls in step 1")) << text;
}

// The gradient of an embedding has zeros in the rows that a batch does not use.
TEST_F(StepsTest, ADifferenceAmongZerosIsFoundAfterSomeSteps) {
  std::vector<uint64_t> usual(4000);
  auto other = usual;
  usual[3] = kUsual;
  other[7] = kOther;
  std::string text = "no error";
  for (uint32_t step = 0; step < 400 && text == "no error"; ++step) {
    begin(step);
    for (std::size_t rank = 0; rank < 3 && text == "no error"; ++rank) {
      const auto& words = rank == 2 ? other : usual;
      trackers[rank].add_result(words.data(), words.size() * sizeof(words.front()));
      text = error_of([this, rank] { check_calls(rank); });
    }
  }
  EXPECT_TRUE(contains(text, "different collective calls in step ")) << text;
}

TEST_F(StepsTest, ADifferenceInTheLastBytesIsFound) {
  float usual[3] = {1, 2, 3};
  float other[3] = {1, 2, 4};
  std::string text = "no error";
  for (uint32_t step = 0; step < 4 && text == "no error"; ++step) {
    begin(step);
    for (std::size_t rank = 0; rank < 3 && text == "no error"; ++rank) {
      trackers[rank].add_result(rank == 2 ? other : usual, sizeof(usual));
      text = error_of([this, rank] { check_calls(rank); });
    }
  }
  EXPECT_TRUE(contains(text, "different collective calls in step ")) << text;
}

TEST_F(StepsTest, ARankWhoseHookRaisedWaitsForNoRankAndIsMissing) {
  take_step(0);
  begin(1);
  trackers[1].publish(Doing::kHook, 0);
  trackers[1].break_off();
  const auto raised = ranks[1].page().view().activity();
  EXPECT_FALSE(may_wait(raised.doing));
  EXPECT_TRUE(
      contains(ranks[1].peers().names().describe(raised), "step 1, phase communication hook of "));
  trackers[0].publish(Doing::kWaiting, 0);
  EXPECT_EQ(ranks[0].peers().missing(ranks[0].page().view().activity()), std::vector<int>{1});
}

// Rank 2 may have written into a bucket in flight, and raises an error of its own.
TEST_F(StepsTest, IfARankHasSpoiledItsResultsNoResultsCount) {
  take_step(0);
  begin(1);
  EXPECT_EQ(end(0, kUsual), "no error");
  EXPECT_EQ(end(1, kOther), "no error");
  trackers[2].spoil_results();
  EXPECT_EQ(end(2, kUsual), "no error");
  take_step(2);
  take_step(3);
}

TEST_F(StepsTest, IfThatRankAbortedTheStepNoResultsCount) {
  take_step(0);
  begin(1);
  EXPECT_EQ(end(0, kUsual), "no error");
  EXPECT_EQ(end(1, kOther), "no error");
  trackers[2].spoil_results();
  trackers[2].break_off();
  take_step(2);
}

// Two ranks of a group whose backend counts only collective calls.
class CountingRanks {
 public:
  explicit CountingRanks(const std::vector<uint64_t>& sequences) {
    for (const std::size_t rank : {0, 1}) {
      ranks_.make_calls(rank, sequences[rank]);
      ranks_[rank].page().begin_construction();
      trackers.emplace_back(ranks_.shared(rank));
      guards.emplace_back(ranks_.shared(rank));
      trackers.back().number_as_constructed();
    }
  }
  void launch(std::size_t rank, uint32_t step) {
    trackers[rank].begin_step(step);
    trackers[rank].publish_launch(0, 64, 0);
  }

  void check_calls(std::size_t rank) {
    guards[rank].compare_calls(trackers[rank].publish_results(), {});
  }

  std::vector<StepTracker> trackers;
  std::vector<StepGuard> guards;

 private:
  Ranks ranks_{"AA", times::kLease, Start::kTogether, Calls::kCounted};
};

// The first step of rank 0 was aborted, so rank 0 has not compared it.
TEST(StepTrackerTest, BeforeTheFirstStepNoStepIsCompared) {
  CountingRanks ranks({5, 5});
  ranks.launch(0, 1);
  ranks.launch(1, 0);
  EXPECT_EQ(error_of([&] { ranks.check_calls(0); }), "no error");
}

TEST(StepTrackerTest, CountedCallsMustBeTheSame) {
  CountingRanks ranks({41, 42});
  ranks.launch(0, 3);
  ranks.launch(1, 3);
  const auto text = error_of([&] { ranks.check_calls(0); });
  EXPECT_TRUE(contains(text, "rank 1 made one more collective call than rank 0, 42 against 41"))
      << text;
}

TEST(MismatchTest, AllRanksReportTheFailureOfTheFirst) {
  Ranks ranks("AAA");
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&ranks, &texts, rank] {
      const auto words = "the words of rank " + std::to_string(rank);
      texts[rank] =
          error_of([&] { ranks[rank].raise_mismatch({FailureKind::kMismatch, {}, words}); });
      texts[rank] = texts[rank].substr(texts[rank].find("the words"), 19);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
}

}  // namespace
}  // namespace ddpx::health
