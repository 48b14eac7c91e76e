#include "watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "../os/forks.h"
#include "sigterm.h"

namespace ddpx::health {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kBetweenLooksMs = 200;

// After SIGTERM: a rank whose death was the reason is seen to be dead within this time.
constexpr auto kTimeToSee = milliseconds(500);
constexpr auto kTimeToPrint = milliseconds(1000);
constexpr auto kTimeToEnd = milliseconds(2000);  // the write of the report gives up before
constexpr auto kBetweenFastLooks = milliseconds(10);

// Out of memory, for example: the next look tries again.
void look_at(Monitor& monitor) noexcept {
  try {
    monitor.look();
  } catch (const std::exception&) {
  }
}

template <class Condition>
void wait_until(const Condition& condition, milliseconds at_most) {
  const auto deadline = Clock::now() + at_most;
  while (!condition() && Clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenFastLooks);
  }
}

}  // namespace

Watchdog& Watchdog::instance() {
  return os::instance_in_process<Watchdog>();
}

std::shared_ptr<Monitor> Watchdog::watch(WatchedGroup group, StoreAccess store) {
  auto monitor = std::make_shared<Monitor>(std::move(group), std::move(store));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!running_) {
    wake_ = os::UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    std::thread([this] { work(); }).detach();  // may throw; waits for the lock
    running_ = true;
    take_sigterm(wake_.get());
  }
  monitors_.push_back(monitor);
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
  return monitor;
}

std::vector<std::shared_ptr<Monitor>> Watchdog::monitors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return monitors_;
}

void Watchdog::work() {
  while (true) {
    look_at_all();
    if (has_got_sigterm()) {
      answer_sigterm();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (monitors_.empty()) {
        running_ = false;
        give_sigterm_back();
        wake_ = {};
        if (has_got_sigterm()) {
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
      std::erase(monitors_, monitor);
    } else {
      look_at(*monitor);
    }
  }
}

void Watchdog::await_event() {
  std::vector<pollfd> events{{wake_.get(), POLLIN, 0}};
  for (const auto& monitor : monitors()) {
    for (const auto& peer : monitor->peers().all()) {
      const auto* process = peer ? peer->watch() : nullptr;
      if (process != nullptr && process->fd() >= 0 && !process->ended()) {
        events.push_back({process->fd(), POLLIN, 0});
      }
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
    monitor->page().mark_terminated();
  }
  const auto any_failed = [&all] {
    for (const auto& monitor : all) {
      look_at(*monitor);
    }
    return std::any_of(all.begin(), all.end(), [](const auto& each) { return each->failed(); });
  };
  wait_until(any_failed, kTimeToSee);
  auto report = Report::kNotBegun;
  if (report_.compare_exchange_strong(report, Report::kWatchdogWrites)) {
    write_report();
  } else {
    wait_until([this] { return report_ == Report::kPrinted; }, kTimeToPrint);
  }
  die_of_sigterm();
}

void Watchdog::begin_printing() {
  auto report = report_.load();
  while (report != Report::kWatchdogWrites &&
         !report_.compare_exchange_weak(report, Report::kInterpreterPrints)) {
  }
  if (report == Report::kWatchdogWrites) {
    std::this_thread::sleep_for(kTimeToEnd);
  }
}

void Watchdog::write_report() {
  for (const auto& monitor : monitors()) {
    if (const auto report = monitor->report()) {
      write_to_stderr(
          std::string(error_name(report->failure.kind)) + ": " + report->text() +
          " (This rank got SIGTERM.)\n");
      return;
    }
  }
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
  Monitor::await_delivery(all);
}

}  // namespace ddpx::health
