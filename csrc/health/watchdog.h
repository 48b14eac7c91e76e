// The one background thread of a process that monitors all its groups.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../os/unique_fd.h"
#include "monitor.h"

namespace ddpx::health {

// Wakes five times a second, and at once when a peer's process ends or SIGTERM arrives.
// Thread-safe.
//
// Launchers send SIGTERM to survivors when a rank has died. Unless the script has its own handler,
// the watchdog then writes the report of this rank to stderr, and lets the process die of the
// signal.
class Watchdog {
 public:
  static Watchdog& instance();

  // Monitors a group until the group is gone.
  std::shared_ptr<Monitor> watch(WatchedGroup group, StoreAccess store);
  std::vector<std::shared_ptr<Monitor>> monitors() const;

  // All groups of this process: see Monitor.
  void fail_all(const std::string& cause);
  void leave_all();

  // The interpreter begins to print the report, or has printed it. The watchdog then writes no
  // report. If the watchdog has begun to write the report, begin_printing() waits for the end of
  // the process.
  void begin_printing();
  void end_printing() {
    report_ = Report::kPrinted;
  }

 private:
  enum class Report { kNotBegun, kInterpreterPrints, kPrinted, kWatchdogWrites };

  void work();
  void check_all();
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
