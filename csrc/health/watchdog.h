// The one background thread of a process that watches over all its groups.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../os/unique_fd.h"
#include "monitor.h"

namespace ddpx::health {

// Wakes a few times a second, and at once when a peer's process ends or SIGTERM comes. Thread-safe.
//
// SIGTERM: launchers send it to survivors as soon as a rank has died. Unless the script has a
// handler of its own, the watchdog then writes to stderr what this rank knows of the failure, and
// lets the process die of the signal.
class Watchdog {
 public:
  static Watchdog& instance();

  // Watches over a group until the group is gone.
  std::shared_ptr<Monitor> watch(WatchedGroup group, StoreAccess store);
  std::vector<std::shared_ptr<Monitor>> monitors() const;

  // All groups of this process: see Monitor.
  void fail_all(const std::string& cause);
  void leave_all();

  // The interpreter begins to print the report, or has printed it. SIGTERM does not repeat it. If
  // the watchdog has begun to write the report after SIGTERM, begin_printing() waits for the end of
  // the process.
  void begin_printing();
  void end_printing() {
    report_ = Report::kPrinted;
  }

 private:
  enum class Report { kNotBegun, kInterpreterPrints, kPrinted, kWatchdogWrites };

  void work();
  void look_at_all();
  void await_event();
  void answer_sigterm();
  void write_report();

  mutable std::mutex mutex_;  // guards the following; the thread may read `wake_` without it
  std::vector<std::shared_ptr<Monitor>> monitors_;
  bool running_ = false;
  os::UniqueFd wake_;  // an event while the thread runs
  std::atomic<Report> report_{Report::kNotBegun};
};

}  // namespace ddpx::health
