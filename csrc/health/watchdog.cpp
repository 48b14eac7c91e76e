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

// After an error, such as a lack of memory, the next check tries again.
void check(Monitor& monitor) noexcept {
  try {
    monitor.check();
  } catch (const std::exception&) {
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
    check_all();
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
          die_of_sigterm();  // the signal arrived meanwhile, and there is no failure
        }
        return;
      }
    }
    await_event();
  }
}

void Watchdog::check_all() {
  for (const auto& monitor : monitors()) {
    if (monitor->gone()) {
      monitor->leave();
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase(monitors_, monitor);
    } else {
      check(*monitor);
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
  poll(events.data(), events.size(), times::kWatchdogPeriod / times::kMillisecond);
  if ((events.front().revents & POLLIN) != 0) {
    uint64_t count = 0;
    (void)!read(wake_.get(), &count, sizeof(count));
  }
}

void Watchdog::answer_sigterm() {
  const auto all = monitors();
  for (const auto& monitor : all) {
    monitor->page().end_as(Presence::kTerminated);
  }
  const auto any_failed = [&all] {
    for (const auto& monitor : all) {
      check(*monitor);
    }
    return std::any_of(all.begin(), all.end(), [](const auto& each) { return each->failed(); });
  };
  poll_until(now_ns() + times::kFindReason, times::kFailurePoll, any_failed);
  auto report = Report::kNotBegun;
  if (report_.compare_exchange_strong(report, Report::kWatchdogWrites)) {
    write_report();
  } else {
    poll_until(now_ns() + times::kPrintReport, times::kFailurePoll, [this] {
      return report_ == Report::kPrinted;
    });
  }
  die_of_sigterm();
}

void Watchdog::begin_printing() {
  auto report = report_.load();
  while (report != Report::kWatchdogWrites &&
         !report_.compare_exchange_weak(report, Report::kInterpreterPrints)) {
  }
  if (report == Report::kWatchdogWrites) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(times::kAwaitEnd));
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
  const auto deadline_ns = Monitor::delivery_deadline();
  for (const auto& monitor : monitors()) {
    monitor->fail(cause, deadline_ns);
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
