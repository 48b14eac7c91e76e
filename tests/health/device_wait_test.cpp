// The waits of ranks whose hosts queue calls on a device and go on.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "health/machine/record.h"
#include "health/monitor.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

// Ranks of one host, whose calls run on a device.
class DeviceRanks : public Ranks {
 public:
  explicit DeviceRanks(std::size_t size)
      : Ranks(std::string(size, 'A'), times::kLease, Start::kTogether, Calls::kOnDevice) {}
  ~DeviceRanks() {
    StallTimeouts::instance().warn_ns = times::kWarn;
    StallTimeouts::instance().raise_ns = StallTimeouts::kNever;
  }
};

constexpr Activity kLaunchedTwo{.doing = Doing::kBackward, .bucket = 2, .step = 3};
constexpr Activity kBeforeStep{.doing = Doing::kOutside, .step = 3};

TEST(DeviceWaitTest, WhoHasMadeFewerCallsIsNamed) {
  DeviceRanks ranks(3);
  StallTimeouts::instance().warn_ns = 400'000'000;
  ranks.make_calls(0, 7);
  ranks.make_calls(1, 5);
  ranks.make_calls(2, 7);
  const auto text = ranks.warning_of(0);
  EXPECT_TRUE(contains(text, "rank 0 has waited ")) << text;
  EXPECT_TRUE(contains(text, " for other ranks, on its device, in ")) << text;
  EXPECT_TRUE(contains(text, "missing: rank 1, host ")) << text;
  EXPECT_TRUE(contains(text, ", after 5 calls to the group (this rank: 7)")) << text;
  EXPECT_FALSE(contains(text, "rank 2")) << text;
  EXPECT_FALSE(ranks[0].failed());
}

TEST(DeviceWaitTest, ARankThatMakesCallsIsNotLate) {
  DeviceRanks ranks(2);
  StallTimeouts::instance().raise_ns = 700'000'000;
  for (uint64_t call = 1; call < 8; ++call) {  // rank 1 is always behind, for 2 s
    ranks.make_calls(0, call + 3);
    ranks.make_calls(1, call);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_FALSE(ranks[0].failed());
}

TEST(DeviceWaitTest, TheStallErrorNamesTheLatestAndAborts) {
  DeviceRanks ranks(3);
  StallTimeouts::instance().raise_ns = 600'000'000;
  ranks.make_calls(0, 9);
  ranks.make_calls(1, 8);  // rank 1 waits for rank 2, too
  ranks.make_calls(2, 4);
  ASSERT_TRUE(eventually([&] { return ranks[0].failed() && ranks[2].failed(); }));
  EXPECT_EQ(ranks.blamed_by(0), std::vector<int>{2});
  EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kStalled);
  EXPECT_TRUE(eventually([&] { return ranks.num_aborts(0) == 1; }));
}

TEST(DeviceWaitTest, TheErrorComesBeforeTheTimeoutOfTheBackend) {
  DeviceRanks ranks(2);
  *ranks.timeout_ns = 1'800'000'000;
  ranks.make_calls(0, 2);
  ranks.make_calls(1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_FALSE(ranks[0].failed());  // numbers of calls do not show that a call waits
  ranks.make_calls(1, 2);
  const auto start = now_ns();
  ranks[0].page().publish(kLaunchedTwo);
  ranks[1].page().publish(kBeforeStep);
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  EXPECT_LT(now_ns() - start, *ranks.timeout_ns);
  EXPECT_EQ(ranks.blamed_by(0), std::vector<int>{1});
}

TEST(DeviceWaitTest, WhoLeavesBeforeALaunchIsLost) {
  DeviceRanks ranks(2);
  ranks[0].page().publish(kLaunchedTwo);
  ranks[1].page().publish(kBeforeStep);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_FALSE(ranks[0].failed());
  const auto start = now_ns();
  ranks[1].leave();
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  EXPECT_LT(now_ns() - start, 2'000'000'000);
  EXPECT_EQ(ranks[0].report()->failure.kind, FailureKind::kLeft);
  EXPECT_EQ(ranks.blamed_by(0), std::vector<int>{1});
}

// The last published number may be older than the last call.
TEST(DeviceWaitTest, WhoLeavesWithFewerCallsIsLostAfterAWhile) {
  DeviceRanks ranks(2);
  ranks.make_calls(0, 5);
  ranks.make_calls(1, 4);
  const auto start = now_ns();
  ranks[1].leave();
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  EXPECT_GT(now_ns() - start, 2'500'000'000);
  EXPECT_EQ(ranks.blamed_by(0), std::vector<int>{1});
}

TEST(DeviceWaitTest, WhoLeavesAfterAllCallsIsNotLost) {
  DeviceRanks ranks(2);
  for (const std::size_t rank : {0, 1}) {
    ranks.make_calls(rank, 5);
    ranks[rank].page().publish({.doing = Doing::kOutside, .step = 4});
  }
  ranks[1].leave();
  std::this_thread::sleep_for(std::chrono::milliseconds(3500));
  EXPECT_FALSE(ranks[0].failed());
}

TEST(DeviceWaitTest, ADeviceThatDoesNotComputeIsNamed) {
  DeviceRanks ranks(2);
  StallTimeouts::instance().warn_ns = 400'000'000;
  const auto since = now_ns();
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].page().publish({.doing = Doing::kOutside, .step = 5});
    ranks.make_calls(rank, 8);
  }
  ranks[1].page().view().device.store(
      {.doing = Doing::kBackward, .bucket = 1, .step = 3, .since_ns = since});
  ranks[0].page().view().device.store(
      {.doing = Doing::kWaiting, .bucket = 1, .step = 3, .since_ns = since});
  const auto text = ranks.warning_of(0);
  EXPECT_TRUE(contains(text, "in step 3, phase waiting for buckets")) << text;
  EXPECT_TRUE(contains(text, "missing: rank 1, ")) << text;
  EXPECT_TRUE(contains(text, "; its device has computed step 3 for ")) << text;
  StallTimeouts::instance().raise_ns = 500'000'000;
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  const auto error = error_of([&] { ranks[0].raise_if_failed(); });
  EXPECT_TRUE(contains(error, "its device has not computed its gradients")) << error;
}

TEST(DeviceWaitTest, ADeviceThatComputesWaitsForNobody) {
  DeviceRanks ranks(2);
  StallTimeouts::instance().raise_ns = 500'000'000;
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].page().view().device.store(
        {.doing = Doing::kBackward, .bucket = 1, .step = 3, .since_ns = now_ns()});
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_FALSE(ranks[0].failed());
}

// Rank 0 has waited in the last step for a long time. Rank 1 leaves right after its part.
TEST(DeviceWaitTest, WhoLeavesAfterALongWaitIsNotLostAtOnce) {
  DeviceRanks ranks(2);
  for (const std::size_t rank : {0, 1}) {
    ranks.make_calls(rank, 8);
    ranks[rank].page().publish({.doing = Doing::kOutside, .step = 4});
  }
  ranks[0].page().view().device.store(
      {.doing = Doing::kWaiting, .bucket = 1, .step = 3, .since_ns = now_ns() - 20'000'000'000});
  ranks[1].leave();
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  EXPECT_FALSE(ranks[0].failed());
  ranks[0].page().view().device.forget();
}

TEST(DeviceWaitTest, AHostThatWaitsForItsDeviceIsNotLate) {
  DeviceRanks ranks(2);
  StallTimeouts::instance().raise_ns = 500'000'000;
  ranks.make_calls(0, 9);
  ranks.make_calls(1, 5);
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].page().view().device.store(
        {.doing = Doing::kBackward, .bucket = 1, .step = 3, .since_ns = now_ns()});
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_FALSE(ranks[0].failed());
}

TEST(DeviceWaitTest, OtherWrappersTellNothing) {
  DeviceRanks ranks(2);
  StallTimeouts::instance().raise_ns = 500'000'000;
  ranks[0].page().publish(kLaunchedTwo);
  ranks[1].page().publish(
      {.doing = Doing::kForward, .model = 1, .step = 0});  // rank 1 may be ahead
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_FALSE(ranks[0].failed());
}

// The host does not know of an error that the backend has met. Rank 1 has never come.
TEST(DeviceWaitTest, AnErrorOfTheBackendIsExplained) {
  const auto has_error = std::make_shared<std::atomic<bool>>(false);
  auto group = group_of(0, 2);
  group.on_device = true;
  group.has_error = [has_error] { return has_error->load(); };
  const auto monitor = watch(group, access_to(std::make_shared<FakeStore>()));
  monitor->page().publish({Doing::kConstruction, kNoModel, 1, 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(monitor->failed());
  *has_error = true;
  ASSERT_TRUE(eventually([&] { return monitor->failed(); }));
  EXPECT_EQ(monitor->report()->failure.first_rank(), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(monitor->page().view().presence(), Presence::kThere);  // the script has met no error
}

// NCCL cannot shut down before the abort has ended.
TEST(DeviceWaitTest, TheErrorComesAfterTheAbort) {
  for (const bool on_device : {true, false}) {
    for (const bool ends : {true, false}) {
      const auto may_end = std::make_shared<std::atomic<bool>>(false);
      auto group = group_of(0, 2);
      group.on_device = on_device;
      group.abort = [may_end] {
        while (!*may_end) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      };
      const auto monitor = watch(group, access_to(std::make_shared<FakeStore>()));
      const auto start = now_ns();
      std::thread abort([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(400));
        *may_end = ends;
      });
      error_of([&] { monitor->raise_mismatch({FailureKind::kMismatch, {}, "different"}); });
      const auto lasted = now_ns() - start;
      abort.join();
      const auto least = !on_device ? 0 : ends ? 400 * times::kMillisecond : times::kMostAbort;
      EXPECT_GE(lasted, least);
      EXPECT_LT(lasted, least + 300 * times::kMillisecond);
      const auto again = now_ns();
      error_of([&] { monitor->raise_if_failed(); });
      EXPECT_LT(now_ns() - again, 100 * times::kMillisecond);  // the limit is over
      *may_end = true;
    }
  }
}

// Rank 1 has launched all buckets, but has ended before its device had sent them.
TEST(DeviceWaitTest, WhoEndsWhileTheDeviceWaitsIsLost) {
  DeviceRanks ranks(2);
  for (const std::size_t rank : {0, 1}) {
    ranks.make_calls(rank, 8);
    ranks[rank].page().publish({.doing = Doing::kOutside, .step = 4});
  }
  ranks[1].leave();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(ranks[0].failed());
  ranks[0].page().view().device.store(
      {.doing = Doing::kWaiting, .bucket = 1, .step = 3, .since_ns = now_ns()});
  ASSERT_TRUE(eventually([&] { return ranks[0].failed(); }));
  EXPECT_EQ(ranks.blamed_by(0), std::vector<int>{1});
}

// Publishes recorded calls, as ddpx/health/recorded_calls.py does.
void publish(Monitor& monitor, const std::vector<std::string>& calls) {
  std::string record;
  for (std::size_t number = 0; number < calls.size(); ++number) {
    record += encode(uint64_t{number} + 1, calls[number]);
  }
  monitor.page().view().recorded.write(record);
}

TEST(DeviceWaitTest, CallsThatDoNotFitTogetherAreNamed) {
  DeviceRanks ranks(3);
  const std::vector<std::string> calls{"all_reduce of (4,) Float", "all_reduce of (64,) Float"};
  for (const std::size_t rank : {0, 1, 2}) {
    ranks.make_calls(rank, 2);
  }
  const auto start = now_ns();
  ranks.await_record(0, "calls_wanted");
  EXPECT_GT(now_ns() - start, 1'900'000'000);
  for (const std::size_t rank : {0, 1}) {
    publish(ranks[rank], calls);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(ranks[0].failed());
  publish(ranks[2], {calls[0], "broadcast of (64,) Float"});
  ASSERT_TRUE(eventually([&] { return ranks[0].failed() && ranks[2].failed(); }));
  const auto text = error_of([&] { ranks[0].raise_if_failed(); });
  const std::string expected =
      "ranks 0 and 1 made all_reduce of (64,) Float, and rank 2 made broadcast of (64,) Float, as "
      "call 2 of the group";
  EXPECT_TRUE(contains(text, expected)) << text;
}

}  // namespace
}  // namespace ddpx::health
