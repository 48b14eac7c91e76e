#include "watchdog.h"

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <exception>
#include <string>
#include <utility>

namespace ddpx::health {
namespace {

constexpr int kBetweenLooksMs = 200;

// After SIGTERM: a rank whose death was the reason is seen to be dead within this time.
constexpr auto kTimeToSee = std::chrono::milliseconds(500);
constexpr auto kTimeToWrite = std::chrono::milliseconds(1000);
constexpr auto kBetweenFastLooks = std::chrono::milliseconds(10);

std::atomic<uint64_t> forks{0};

// What the signal handler may touch.
std::atomic<int> wake_fd{-1};
std::atomic<pid_t> handler_owner{0};
volatile std::sig_atomic_t sigterm_came = 0;

void die_of_sigterm() {
  std::signal(SIGTERM, SIG_DFL);
  kill(getpid(), SIGTERM);
}

extern "C" void ddpx_on_sigterm(int) {
  const int error = errno;  // of the code that the signal interrupts
  if (getpid() != handler_owner.load(std::memory_order_relaxed)) {
    die_of_sigterm();  // a child that was forked off: nobody watches here
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

// Does nothing if the script has a handler of its own.
void take_sigterm() {
  handler_owner = getpid();
  if (!handles_sigterm(SIG_DFL)) {
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

std::atomic<Watchdog*> current{nullptr};

// In a child neither the thread nor the peers are there. The old one is left alone: its lock may
// have been held.
void after_fork_in_child() {
  forks.fetch_add(1);
  current.store(nullptr);
}

// Out of memory, say: the next look tries again.
void look_at(Monitor& monitor) noexcept {
  try {
    monitor.look();
  } catch (const std::exception&) {
  }
}

// Gives up where nobody reads a full pipe: SIGTERM has to end the process.
void write_to_stderr(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + kTimeToWrite;
  std::size_t written = 0;
  while (written < text.size() && std::chrono::steady_clock::now() < deadline) {
    pollfd pipe{STDERR_FILENO, POLLOUT, 0};
    if (poll(&pipe, 1, kBetweenLooksMs) <= 0) {
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

}  // namespace

uint64_t num_forks() {
  return forks.load(std::memory_order_relaxed);
}

Watchdog& Watchdog::instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)registered;
  if (auto* watchdog = current.load()) {
    return *watchdog;
  }
  auto* made = new Watchdog;  // never destroyed: its thread may run until the process ends
  Watchdog* other = nullptr;
  if (current.compare_exchange_strong(other, made)) {
    return *made;
  }
  delete made;  // another thread was quicker
  return *other;
}

Watchdog::Watchdog() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void Watchdog::add(const std::shared_ptr<Monitor>& monitor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  monitors_.push_back(monitor);
  if (!std::exchange(running_, true)) {
    wake_fd = wake_.get();
    take_sigterm();
    std::thread([this] { work(); }).detach();
  } else {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
  }
}

std::vector<std::shared_ptr<Monitor>> Watchdog::monitors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return monitors_;
}

void Watchdog::work() {
  while (true) {
    look_at_all();
    if (sigterm_came) {
      answer_sigterm();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (monitors_.empty()) {
        running_ = false;
        give_sigterm_back();
        if (sigterm_came) {
          die_of_sigterm();  // it came meanwhile, and there is nothing to report
        }
        return;
      }
    }
    await_event();
  }
}

void Watchdog::look_at_all() {
  for (const auto& monitor : monitors()) {
    if (monitor->gone()) {
      monitor->leave();
      const std::lock_guard<std::mutex> lock(mutex_);
      monitors_.erase(std::remove(monitors_.begin(), monitors_.end(), monitor), monitors_.end());
    } else {
      look_at(*monitor);
    }
  }
}

void Watchdog::await_event() {
  std::vector<pollfd> events{{wake_.get(), POLLIN, 0}};
  for (const auto& monitor : monitors()) {
    for (const int fd : monitor->ends_of_peers()) {
      events.push_back({fd, POLLIN, 0});
    }
  }
  poll(events.data(), events.size(), kBetweenLooksMs);
  if ((events.front().revents & POLLIN) != 0) {
    uint64_t count = 0;
    (void)!read(wake_.get(), &count, sizeof(count));
  }
}

void Watchdog::answer_sigterm() {
  const auto all = monitors();
  for (const auto& monitor : all) {
    monitor->mark_terminated();
  }
  const auto deadline = std::chrono::steady_clock::now() + kTimeToSee;
  const auto failed = [](const auto& monitor) { return monitor->failed(); };
  while (std::none_of(all.begin(), all.end(), failed) &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenFastLooks);
    for (const auto& monitor : all) {
      look_at(*monitor);
    }
  }
  const auto reported = std::find_if(all.begin(), all.end(), failed);
  if (printing_ != Printing::kNotBegun) {
    const auto end = std::chrono::steady_clock::now() + kTimeToWrite;
    while (printing_ != Printing::kDone && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kBetweenFastLooks);
    }
  } else if (reported != all.end()) {
    const auto report = (*reported)->report();
    write_to_stderr(
        std::string(error_name(report->failure.kind)) + ": " + report->text() +
        " (This rank got SIGTERM.)\n");
  }
  die_of_sigterm();
}

void Watchdog::fail_all(const std::string& cause) {
  const auto deadline = Monitor::delivery_deadline();
  for (const auto& monitor : monitors()) {
    monitor->fail(cause, deadline);
  }
}

void Watchdog::leave_all() {
  const auto all = monitors();
  for (const auto& monitor : all) {
    monitor->leave();
  }
  for (const auto& monitor : all) {
    monitor->await_delivery();
  }
}

}  // namespace ddpx::health
