#include "sigterm.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>

namespace ddpx::health {
namespace {

constexpr auto kTimeToWrite = std::chrono::milliseconds(1000);
constexpr int kBetweenPollsMs = 200;

// What the signal handler may touch.
std::atomic<int> wake_fd{-1};
std::atomic<pid_t> handler_owner{0};
volatile std::sig_atomic_t sigterm_came = 0;

extern "C" void ddpx_on_sigterm(int) {
  const int error = errno;  // of the code that the signal interrupts
  if (getpid() != handler_owner.load(std::memory_order_relaxed)) {
    die_of_sigterm();  // a child that was forked off has no watchdog
    return;
  }
  sigterm_came = 1;
  const uint64_t one = 1;
  (void)!write(wake_fd.load(std::memory_order_relaxed), &one, sizeof(one));
  errno = error;
}

bool handles_sigterm(void (*handler)(int)) {
  struct sigaction now{};
  sigaction(SIGTERM, nullptr, &now);
  return now.sa_handler == handler;
}

}  // namespace

void take_sigterm(int fd) {
  wake_fd = fd;
  handler_owner = getpid();
  // The first process of a container does not die of SIGTERM: without a handler, the kernel drops
  // the signal.
  if (getpid() == 1 || !handles_sigterm(SIG_DFL)) {
    return;
  }
  struct sigaction ours{};
  ours.sa_handler = ddpx_on_sigterm;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGTERM, &ours, nullptr);
}

void give_sigterm_back() {
  if (handles_sigterm(ddpx_on_sigterm)) {
    std::signal(SIGTERM, SIG_DFL);
  }
}

bool has_got_sigterm() {
  return sigterm_came != 0;
}

void die_of_sigterm() {
  std::signal(SIGTERM, SIG_DFL);
  kill(getpid(), SIGTERM);
}

void write_to_stderr(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + kTimeToWrite;
  std::size_t written = 0;
  while (written < text.size() && std::chrono::steady_clock::now() < deadline) {
    pollfd pipe{STDERR_FILENO, POLLOUT, 0};
    if (poll(&pipe, 1, kBetweenPollsMs) <= 0) {
      continue;
    }
    // A pipe that is ready takes this many bytes at once.
    const auto size = std::min<std::size_t>(text.size() - written, PIPE_BUF);
    const auto count = write(STDERR_FILENO, text.data() + written, size);
    if (count <= 0) {
      return;
    }
    written += static_cast<std::size_t>(count);
  }
}

}  // namespace ddpx::health
