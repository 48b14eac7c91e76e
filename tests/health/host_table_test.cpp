// The failure that a host declares.
#include "health/machine/host_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "health/machine/page.h"

namespace ddpx::health {
namespace {

// A rank that is stopped while it declares a failure, until the end of this object.
class StoppedRank {
 public:
  explicit StoppedRank(HostTable& table)
      : thread_([this, &table] {
          table.failure.declare([this](auto& draft) {
            is_stopped_ = true;
            while (!may_go_on_) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            draft = {};
          });
        }) {
    while (!is_stopped_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~StoppedRank() {
    may_go_on_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> is_stopped_{false};
  std::atomic<bool> may_go_on_{false};
  std::thread thread_;  // last: uses the other members
};

TEST(HostTableTest, ARankThatIsStoppedWhileItDeclaresChangesNothingLater) {
  OwnPage page(1, 2);
  auto& table = *page.host();
  {
    const StoppedRank slow(table);
    EXPECT_EQ(table.declare("quick"), "quick");
  }
  EXPECT_EQ(table.declared(), "quick");
  EXPECT_EQ(table.declare("late"), "quick");
}

TEST(FirstRecordTest, OfManyThreadsOneIsTheFirst) {
  os::FirstRecord<std::string> record{};
  EXPECT_EQ(record.get(), nullptr);
  std::atomic<int> num_first{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      num_first += record.declare([&](std::string& own) { own = std::to_string(i); }) ? 1 : 0;
      ASSERT_NE(record.get(), nullptr);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_first, 1);
  EXPECT_EQ(record.get()->size(), 1u);
}

TEST(HostTableTest, ARankReportsItsOwnFailureIfAllOthersAreStopped) {
  OwnPage page(1, 2);
  auto& table = *page.host();
  const StoppedRank first(table);
  const StoppedRank second(table);
  const StoppedRank third(table);
  const StoppedRank fourth(table);
  EXPECT_EQ(table.declare("own"), "own");
  EXPECT_FALSE(table.declared());
}

}  // namespace
}  // namespace ddpx::health
