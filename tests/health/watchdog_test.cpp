// SIGTERM, and forked children.
#include "health/watchdog.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <string>
#include <system_error>

#include "../shm/no_threads.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

// Runs `work` in a forked child, and returns the child's wait status; 0 if it had to be killed.
template <class Work>
int status_of_child(const Work& work) {
  const pid_t pid = fork();
  if (pid == 0) {
    std::signal(SIGTERM, SIG_DFL);  // a watchdog of an earlier test may hold it
    work();
    _exit(1);
  }
  int status = 0;
  const auto ended = [&] { return waitpid(pid, &status, WNOHANG) == pid; };
  if (!eventually(ended)) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return 0;
  }
  return status;
}

// In a child process, which has no watchdog yet.
TEST(WatchdogTest, TriesAgainIfItsThreadCannotStart) {
  const int status = status_of_child([] {
    const auto store = std::make_shared<FakeStore>();
    {
      const shm::NoThreads none;
      EXPECT_THROW(watch(group_of(0, 2), access_to(store)), std::system_error);
    }
    struct sigaction now{};
    sigaction(SIGTERM, nullptr, &now);
    const auto monitor = watch(group_of(0, 2), access_to(store));
    const bool works = eventually([&] { return store->num_requests > 0; });
    _exit(works && now.sa_handler == SIG_DFL ? 3 : 4);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
}

class SigtermTest : public testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer keeps signals from handlers in forked children";
#endif
  }
};

// Whether the process of a rank in a failed group dies of SIGTERM, with `fd` as its stderr.
bool dies_of_sigterm(int fd) {
  const int status = status_of_child([fd] {
    dup2(fd, STDERR_FILENO);
    Ranks ranks("AA");
    ranks[1].fail("ValueError: " + std::string(2000, 'x'), Monitor::delivery_deadline());
    eventually([&] { return ranks[0].failed(); });
    std::raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::seconds(30));
  });
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM;
}

// Fills a pipe: further writes block.
void fill(int pipe_fd) {
  fcntl(pipe_fd, F_SETFL, O_NONBLOCK);
  const std::string text(4096, 'x');
  while (write(pipe_fd, text.data(), text.size()) > 0) {
  }
  fcntl(pipe_fd, F_SETFL, 0);
}

TEST_F(SigtermTest, EndsTheProcessThoughNobodyReadsItsStderr) {
  std::array<int, 2> pipe_fds{};
  ASSERT_EQ(pipe2(pipe_fds.data(), 0), 0);
  fill(pipe_fds[1]);
  EXPECT_TRUE(dies_of_sigterm(pipe_fds[1]));
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

// Other ranks may fill a pipe after poll() has found it ready. Here poll() finds a socket with a
// small buffer ready, but the buffer does not take the whole report.
TEST_F(SigtermTest, EndsTheProcessThoughAWriteToItsReadyStderrBlocks) {
  std::array<int, 2> fds{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()), 0);
  const int smallest = 0;
  ASSERT_EQ(setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &smallest, sizeof(smallest)), 0);
  ASSERT_EQ(write(fds[1], "x", 1), 1);
  pollfd ready{fds[1], POLLOUT, 0};
  ASSERT_EQ(poll(&ready, 1, 0), 1);
  EXPECT_TRUE(dies_of_sigterm(fds[1]));
  close(fds[1]);
  std::string written(65536, ' ');
  EXPECT_GT(recv(fds[0], written.data(), written.size(), MSG_WAITALL), 1000);
  EXPECT_FALSE(contains(written, "This rank got SIGTERM")) << "the report was not too long";
  close(fds[0]);
}

// The text that a rank in a failed group writes to stderr at SIGTERM, after `prepare`.
template <class Prepare>
std::string written_at_sigterm(const Prepare& prepare) {
  std::array<int, 2> fds{};
  EXPECT_EQ(pipe2(fds.data(), 0), 0);
  status_of_child([&] {
    dup2(fds[1], STDERR_FILENO);
    Ranks ranks("AA");
    ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
    eventually([&] { return ranks[0].failed(); });
    prepare();
    std::raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::seconds(30));
  });
  close(fds[1]);
  std::array<char, 8192> text{};
  const auto length = read(fds[0], text.data(), text.size());
  close(fds[0]);
  return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

TEST_F(SigtermTest, WritesTheReportUnlessTheInterpreterHasPrintedIt) {
  const auto report = written_at_sigterm([] {});
  EXPECT_TRUE(contains(report, "ddpx.RankFailure: [ddpx rank 0")) << report;
  EXPECT_EQ(
      written_at_sigterm([] {
        Watchdog::instance().begin_printing();
        Watchdog::instance().end_printing();
      }),
      "");
}

// The watchdog blocks in its write when the interpreter begins to print the same report.
TEST_F(SigtermTest, TheInterpreterDoesNotRepeatTheReportOfTheWatchdog) {
  const int status = status_of_child([] {
    std::array<int, 2> fds{};
    ASSERT_EQ(pipe2(fds.data(), 0), 0);
    fill(fds[1]);
    dup2(fds[1], STDERR_FILENO);
    Ranks ranks("AA");
    ranks[1].fail("ValueError: no", Monitor::delivery_deadline());
    eventually([&] { return ranks[0].failed(); });
    std::raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    Watchdog::instance().begin_printing();
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << "begin_printing() returned";
}

TEST_F(SigtermTest, LeavesErrnoOfTheInterruptedCode) {
  constexpr int kUnchanged = 42;
  const int status = status_of_child([] {
    Ranks ranks("AA");
    for (int fd = 3; fd < 1000; ++fd) {  // the handler's write fails
      const auto path = "/proc/self/fd/" + std::to_string(fd);
      std::array<char, 64> target{};
      if (readlink(path.c_str(), target.data(), target.size() - 1) > 0 &&
          contains(target.data(), "eventfd")) {
        close(fd);
      }
    }
    errno = ENOTTY;
    std::raise(SIGTERM);
    _exit(errno == ENOTTY ? kUnchanged : 1);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kUnchanged) << status;
}

// A thread of the parent may hold the lock of the parent's queue.
TEST(LogQueueTest, AForkedChildHasItsOwn) {
  LogQueue::instance().add({});
  constexpr int kEmpty = 42;
  const int status = status_of_child([] {
    const bool empty = !LogQueue::instance().take();
    LogQueue::instance().add({});
    _exit(empty && LogQueue::instance().take() ? kEmpty : 1);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kEmpty) << status;
  EXPECT_TRUE(LogQueue::instance().take());
}

TEST(LogQueueTest, ARecordStartsAReaderUnlessOneReads) {
  LogQueue queue;
  int num_starts = 0;
  bool can_start = true;
  queue.add({});  // before there are readers
  queue.set_reader([&] {
    ++num_starts;
    return can_start;
  });
  EXPECT_EQ(num_starts, 0);
  queue.add({});
  queue.add({});
  EXPECT_EQ(num_starts, 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(queue.take());
  }
  queue.add({});
  EXPECT_EQ(num_starts, 1);  // the reader has not ended
  EXPECT_TRUE(queue.take());
  EXPECT_FALSE(queue.take());
  queue.add({});
  EXPECT_EQ(num_starts, 2);
  EXPECT_TRUE(queue.take());
  EXPECT_FALSE(queue.take());
  can_start = false;  // at the limit of threads, the next record tries again
  queue.add({});
  queue.add({});
  EXPECT_EQ(num_starts, 4);
  can_start = true;
  queue.add({});
  queue.add({});
  EXPECT_EQ(num_starts, 5);
  queue.set_reader(nullptr);
  EXPECT_TRUE(queue.take());
  EXPECT_TRUE(queue.take());
  EXPECT_TRUE(queue.take());
  EXPECT_TRUE(queue.take());
  EXPECT_FALSE(queue.take());
  queue.add({});
  EXPECT_EQ(num_starts, 5);
}

}  // namespace
}  // namespace ddpx::health
