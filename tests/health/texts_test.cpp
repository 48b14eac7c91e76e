// Records that ranks write for each other, and texts for users.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "health/machine/host_table.h"
#include "health/machine/introduction.h"
#include "health/machine/names.h"
#include "health/machine/peer.h"
#include "health/machine/record.h"
#include "health/verdict/failure.h"

namespace ddpx::health {
namespace {

Failure two_lost() {
  return Failure{
      FailureKind::kLeft,
      {{3, "a:b\n7:c", 12, "was killed by SIGKILL", "ValueError: 5:no", "step 1"},
       {4, "d", 13, "died", "", ""}},
      {}};
}

TEST(TextsTest, FailuresOfAnyContentTravel) {
  const auto found = Failure::decode(two_lost().encode());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kLeft);
  ASSERT_EQ(found->lost.size(), 2u);
  EXPECT_EQ(found->describe(), two_lost().describe());
  EXPECT_EQ(found->lost[1].rank, 4);
  EXPECT_EQ(found->lost[0].cause, "ValueError: 5:no");
}

TEST(TextsTest, OfACutFailureAllLostRanksRemain) {
  const auto text = two_lost().encode();
  for (std::size_t length = 0; length < text.size(); ++length) {
    if (const auto found = Failure::decode(text.substr(0, length))) {
      ASSERT_EQ(found->lost.size(), 2u);
      EXPECT_EQ(found->lost[1].rank, 4);
      EXPECT_EQ(found->lost[1].what, "is lost, too");
    }
  }
}

TEST(TextsTest, AllRanksOfManyLostHostsFitIntoTheSlotOfAHost) {
  Failure failure;
  std::vector<int> ranks;
  for (int rank = 1; rank < 4096; rank += rank % 8 == 7 ? 2 : 1) {
    ranks.push_back(rank);
    failure.lost.push_back(
        {rank, "a-name-of-a-host", 123456, std::string(86, 'x'), {}, std::string(110, 'y')});
  }
  const auto table = std::make_unique<HostTable>();
  const auto found = Failure::decode(table->declare(failure.encode()));
  ASSERT_TRUE(found);
  std::vector<int> read;
  for (const auto& each : found->lost) {
    read.push_back(each.rank);
  }
  EXPECT_EQ(read, ranks);
  const auto text = found->describe();
  EXPECT_TRUE(text.starts_with("rank 1 (host a-name-of-a-host, pid 123456) xxx"));
  EXPECT_TRUE(text.ends_with("4081-4087,4089-4095 are lost, too")) << text.substr(15000);
}

TEST(TextsTest, AFailureWithoutLostRanksOfTheGroupTravels) {
  const Failure failure{FailureKind::kDead, {}, "the launcher died"};
  const auto found = Failure::decode(failure.encode());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FailureKind::kDead);
  EXPECT_EQ(found->describe(), "the launcher died");
}

TEST(TextsTest, RubbishIsNoFailure) {
  for (const auto& record :
       {std::string(),
        std::string("x"),
        std::string(7, '\0'),
        std::string(100, '\xff'),
        encode(FailureKind::kDead),
        encode(FailureKind::kDead, std::string(), std::vector<health::Run>())}) {
    EXPECT_FALSE(Failure::decode(record)) << record.size();
  }
}

TEST(TextsTest, AReportSaysWhoWhatWhere) {
  RankReport report{two_lost(), 2, 7, Doing::kWaiting, 1, {"a", "b"}, {}, {}, false, {}};
  const auto text = report.text();
  EXPECT_EQ(text.rfind("[ddpx rank 2, step 7, phase waiting for buckets] rank 3 (host ", 0), 0u);
  EXPECT_NE(
      text.find("was killed by SIGKILL (ValueError: 5:no); it was last seen in step 1"),
      std::string::npos);
  EXPECT_NE(text.find(". And rank 4 (host d, pid 13) died."), std::string::npos);
  EXPECT_NE(text.find("waiting for bucket 1 ('a', 'b')."), std::string::npos);
  EXPECT_EQ(text.find("this rank is"), std::string::npos);
  EXPECT_EQ(text.find("ddpx.shrink"), std::string::npos);
  report.rank = 3;
  EXPECT_NE(report.text().find("] this rank is the lost one, "), std::string::npos);
  report.can_shrink = true;
  EXPECT_NE(report.text().find("call ddpx.shrink(model, optimizer, "), std::string::npos);
  report.names = RankNames({0, 1, 2, 9, 4});
  EXPECT_EQ(report.text().rfind("[ddpx rank 3 (rank 9 of the job), step 7, ", 0), 0u);
  EXPECT_NE(report.text().find(": rank 3 (rank 9 of the job, host "), std::string::npos);
  EXPECT_NE(report.text().find(". And rank 4 (host d, pid 13) died."), std::string::npos);
}

TEST(TextsTest, AReportSaysNothingOfWhatIsUnknown) {
  const Failure unknown{FailureKind::kDead, {{2, "unknown", 0, "never wrapped", "", ""}}, {}};
  EXPECT_EQ(unknown.describe(), "rank 2 (host unknown) never wrapped");
}

TEST(TextsTest, AReportsSentencesEndOnce) {
  const Failure failure{FailureKind::kMismatch, {}, "ranks must do the same."};
  const RankReport report{failure, 0, 5, Doing::kForward, std::nullopt, {}, {}, {}, false, {}};
  EXPECT_NE(report.text().find("the same. Sums"), std::string::npos) << report.text();
}

TEST(TextsTest, IntroductionsTravel) {
  const auto own = Introduction::own(3, "A", 7, 99);
  const auto found = Introduction::decode(own.encode());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->host, own.host);
  EXPECT_EQ(found->process.machine, own.process.machine);
  EXPECT_EQ(found->process.pid, own.process.pid);
  EXPECT_EQ(found->process.start_time, own.process.start_time);
  EXPECT_EQ(found->rank, 3);
  EXPECT_EQ(found->page_fd, 7);
  EXPECT_EQ(found->token, 99u);
  EXPECT_NE(Introduction::own(3, "B", 7, 99).process.machine, own.process.machine);
  EXPECT_FALSE(Introduction::decode("host\nmachine\n12 x"));
  EXPECT_FALSE(Introduction::decode(std::string(Introduction::kMostBytes, '\0')));
  EXPECT_TRUE(Introduction::decode(own.encode() + std::string(9, '\0')));
}

TEST(TextsTest, RecordsTravel) {
  const auto record = encode(std::string("\0a", 2), uint64_t{7}, std::vector<int>{1, 2});
  std::string text;
  uint64_t number = 0;
  std::vector<int> numbers;
  const auto two = record + record;
  std::string_view rest = two;
  ASSERT_TRUE(decode(rest, text, number, numbers));
  EXPECT_EQ(text, std::string("\0a", 2));
  EXPECT_EQ(number, 7u);
  EXPECT_EQ(numbers, (std::vector<int>{1, 2}));
  EXPECT_TRUE(decode(rest, text, number, numbers));
  EXPECT_TRUE(rest.empty());
  for (std::size_t length = 0; length < record.size(); ++length) {
    rest = std::string_view(record).substr(0, length);
    EXPECT_FALSE(decode(rest, text, number, numbers)) << length;
  }
}

TEST(TextsTest, RunsOfNumbersTravel) {
  const std::vector<int> numbers{0, 1, 2, 7, 9, 10};
  EXPECT_EQ(to_runs(numbers).size(), 3u);
  EXPECT_EQ(from_runs<int>(to_runs(numbers), 100), numbers);
  EXPECT_EQ(from_runs<int>(to_runs(numbers), 9), (std::vector<int>{0, 1, 2, 7}));
  EXPECT_TRUE(from_runs<int>({{5, 3}}, 100).empty());
}

TEST(TextsTest, ValuesOfOtherProcessesAreChecked) {
  const std::vector<health::Run> many{{3, UINT32_MAX}};
  EXPECT_FALSE(Failure::decode(encode(uint8_t{9}, std::string(), many)));
  EXPECT_EQ(Failure::decode(encode(uint8_t{0}, std::string(), many))->lost.size(), 65533u);
  EXPECT_EQ(Activity::unpacked(~uint64_t{0}, 0).doing, Doing::kPending);
}

TEST(TextsTest, SecondsHaveNoExponent) {
  EXPECT_EQ(in_seconds(250'000'000), "0.25");
  EXPECT_EQ(in_seconds(12'340'000'000), "12.3");
  EXPECT_EQ(in_seconds(123'400'000'000), "123");
  EXPECT_EQ(in_seconds(12'345'600'000'000), "12346");
}

TEST(TextsTest, LongListsOfNamesAreCut) {
  EXPECT_EQ(join_names({"a", "b", "c"}, 2), "'a', 'b' and 1 more");
  WrapperNames names;
  names.set(1, {.buckets = {{"a"}, {"b", "c"}}});
  EXPECT_EQ(
      names.describe({Doing::kWaiting, 1, 1, 3, 0}),
      "step 3, phase waiting for buckets of wrapper 1, bucket 1 ('b', 'c')");
  EXPECT_EQ(
      names.describe({Doing::kWaiting, 0, 9, 3, 0}), "step 3, phase waiting for buckets, bucket 9");
}

}  // namespace
}  // namespace ddpx::health
