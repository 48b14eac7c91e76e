// The failure detector of one rank, for one process group.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls/recorded_calls.h"
#include "group_state.h"
#include "verdict/cause_search.h"
#include "verdict/stall_watch.h"
#include "verdict/wait_search.h"

namespace ddpx::health {

// Connects the parts of the failure detector. Owned by the watchdog, whose thread calls check()
// five times a second, until the group is gone. Thread-safe. A function waits only if its comment
// says so, after an error or without a lease.
class Monitor : public std::enable_shared_from_this<Monitor> {
 public:
  Monitor(WatchedGroup group, StoreAccess store);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  GroupState& state() const {
    return *state_;
  }
  OwnPage& page() const {
    return state_->page;
  }
  PeerTable& peers() const {
    return state_->peers;
  }

  // ---- for reducers ----------------------------------------------------------------------------

  // Throws in a process that was forked off from the one that made this. No system call.
  void check_process() const;

  // Whether the group cannot continue. One atomic load.
  bool failed() const {
    return failure_.get() != nullptr;
  }
  // `said`: the error of the backend, or empty. On a device, waits until the abort has ended, at
  // most kMostAbort after the failure. Returns at once in a forked child.
  void raise_if_failed(const std::string& said = {});

  // Declares that ranks make different collective calls, or another mismatch, and raises it. All
  // ranks raise the same error. Waits as raise_if_failed().
  [[noreturn]] void raise_mismatch(Failure mismatch);

  // After a collective call has failed with the text `said`. Waits until the cause is found, for
  // some seconds at most. Raises if ranks are lost or late. Returns if all ranks live, and at once
  // in a forked child.
  void explain_error(const std::string& said);

  // Waits while other hosts may have declared this host lost. Raises if they have, or if the store
  // does not answer. Returns at once if all ranks are on one host.
  void await_lease();

  // The main thread has raised the failure between calls of ddpx; see health::interrupt.
  void mark_interrupted() {
    interrupted_ = true;
  }
  bool interrupted() const {
    return interrupted_;
  }

  // The failure as this rank raises it. nullopt if the group has not failed.
  std::optional<RankReport> report() const;

  // ---- the end of this rank --------------------------------------------------------------------

  // The script ends with an error. If there are several hosts, waits until the store has the
  // failure, or until `deadline_ns`; see delivery_deadline().
  void fail(const std::string& cause, int64_t deadline_ns);
  static int64_t delivery_deadline();

  // The script, or the group, has ended without an error.
  void leave();

  // After the end of this rank in these groups. Waits until other hosts have read what this rank
  // posted, since the store may end with this process.
  static void await_delivery(const std::vector<std::shared_ptr<Monitor>>& monitors);

  // Another group has replaced this group. Watching and reports end.
  void retire() {
    retired_ = true;
  }

  // ---- for the watchdog ------------------------------------------------------------------------

  bool gone() const {
    return retired_ || state_->group.gone();
  }
  void check();

 private:
  bool is_forked() const;
  bool must_be_read(int64_t deadline_ns) const;
  void declare(const Failure& failure);
  void start_abort() const;
  void log_failure() const;
  std::optional<Failure> find_failure(const std::optional<Wait>& wait);
  void check_self();
  void find_cause_of_error(const std::string& said);
  bool explain_error_of_backend();

  const uint64_t forks_;  // when this was made
  const std::shared_ptr<GroupState> state_;
  os::FirstRecord<Failure> failure_{};
  WaitSearch waits_;
  StallWatch stalls_;
  RecordedCalls recorded_;
  AwakeTime awake_;
  bool explains_error_ = false;     // of the backend
  uint32_t num_stacks_served_ = 0;  // of the watchdog's thread
  std::atomic<bool> retired_{false};
  std::atomic<bool> interrupted_{false};
  std::atomic<int64_t> failed_ns_{0};  // when the failure was declared
};

}  // namespace ddpx::health
