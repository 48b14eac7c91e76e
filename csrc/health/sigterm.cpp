#include "sigterm.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <thread>

#include "../os/threads.h"
#include "times.h"

namespace ddpx::health {
namespace {

// Variables of the signal handler.
std::atomic<int> wake_fd{-1};
std::atomic<int> num_handlers{0};  // that run now
std::atomic<pid_t> handler_owner{0};
volatile std::sig_atomic_t sigterm_came = 0;

extern "C" void ddpx_on_sigterm(int) {
  const int error = errno;  // of the code that the signal interrupts
  if (getpid() != handler_owner.load(std::memory_order_relaxed)) {
    die_of_sigterm();  // a child that was forked off has no watchdog
    return;
  }
  sigterm_came = 1;
  num_handlers.fetch_add(1);
  const uint64_t one = 1;
  (void)!write(wake_fd.load(), &one, sizeof(one));
  num_handlers.fetch_sub(1);
  errno = error;
}

// Waits for a reader, also where `fd` does not block.
void write_all(int fd, const std::string& text) {
  for (std::size_t written = 0; written < text.size();) {
    pollfd ready{fd, POLLOUT, 0};
    poll(&ready, 1, -1);
    const auto count = write(fd, text.data() + written, text.size() - written);
    if (count >= 0) {
      written += static_cast<std::size_t>(count);
    } else if (errno != EAGAIN && errno != EINTR) {
      return;
    }
  }
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
  wake_fd = -1;
  while (num_handlers != 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(times::kFlagPoll));
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
  const auto end = std::make_shared<std::promise<void>>();
  const bool started = os::start_thread([text, end] {
    write_all(STDERR_FILENO, text);
    end->set_value();
  });
  if (started) {
    end->get_future().wait_for(std::chrono::nanoseconds(times::kWriteReport));
  }
}

}  // namespace ddpx::health
