// The failure that stands for a host.
#include "health/machine/host_table.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "health/machine/page.h"

namespace ddpx::health {
namespace {

// A text whose reader is stopped in the middle until go_on(). There is one such text at a time.
class StoppingText {
 public:
  StoppingText() : text_(kNumPages * page_bytes(), 's') {
    const auto begin = reinterpret_cast<std::uintptr_t>(text_.data());
    page_ = reinterpret_cast<void*>((begin + page_bytes() - 1) / page_bytes() * page_bytes());
    reached_ = false;
    may_go_on_ = false;
    struct sigaction action{};
    action.sa_handler = stop;
    action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second fault is an error
    sigaction(SIGSEGV, &action, &before_);
    mprotect(page_, page_bytes(), PROT_NONE);
  }
  ~StoppingText() {
    mprotect(page_, page_bytes(), PROT_READ | PROT_WRITE);
    sigaction(SIGSEGV, &before_, nullptr);
  }
  StoppingText(const StoppingText&) = delete;
  StoppingText& operator=(const StoppingText&) = delete;

  const std::string& text() const {
    return text_;
  }
  void await_reader() const {
    while (!reached_) {
      std::this_thread::yield();
    }
  }
  void go_on() {
    may_go_on_ = true;
  }

  static std::size_t page_bytes() {
    return static_cast<std::size_t>(getpagesize());
  }

 private:
  static constexpr std::size_t kNumPages = 64;

  static void stop(int) {
    reached_ = true;
    while (!may_go_on_) {
      usleep(1000);
    }
    mprotect(page_, page_bytes(), PROT_READ | PROT_WRITE);
  }

  static inline std::atomic<bool> reached_;
  static inline std::atomic<bool> may_go_on_;
  static inline void* page_ = nullptr;
  std::string text_;
  struct sigaction before_{};
};

TEST(HostTableTest, ARankThatIsStoppedWhileItDeclaresChangesNothingLater) {
  if (2 * StoppingText::page_bytes() > sizeof(HostTable::DeclaredFailure::bytes)) {
    GTEST_SKIP() << "a failure is shorter than two pages of memory";
  }
  OwnPage page(1, 2);
  auto& table = *page.host();
  StoppingText slow;
  std::string of_slow_rank;
  std::thread rank([&] { of_slow_rank = table.declare(slow.text(), 1); });
  slow.await_reader();
  EXPECT_EQ(table.declare("quick", 2), "quick");
  slow.go_on();
  rank.join();
  EXPECT_TRUE(table.declared() == "quick");  // not EXPECT_EQ, which prints the long text
  EXPECT_EQ(table.failure.get()->written_ns, 2);
  EXPECT_TRUE(of_slow_rank == "quick");
  EXPECT_EQ(table.declare("late", 3), "quick");
}

TEST(HostTableTest, TheFirstFailureOfAHostStands) {
  OwnPage page(1, 2);
  auto& table = *page.host();
  EXPECT_FALSE(table.declared());
  EXPECT_EQ(table.declare("one", 1), "one");
  EXPECT_EQ(table.declare("two", 2), "one");
  EXPECT_EQ(table.failure.get()->written_ns, 1);
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
  std::vector<std::thread> stopped;
  std::atomic<bool> may_end{false};
  std::atomic<int> num_stopped{0};
  for (int i = 0; i < 4; ++i) {
    stopped.emplace_back([&] {
      table.failure.declare([&](auto&) {
        ++num_stopped;
        while (!may_end) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
    });
  }
  while (num_stopped < 4) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(table.declare("own", 1), "own");
  EXPECT_FALSE(table.declared());
  may_end = true;
  for (auto& each : stopped) {
    each.join();
  }
}

}  // namespace
}  // namespace ddpx::health
