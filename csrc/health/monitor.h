// The failure detector of one rank, for one process group.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "channel_threads.h"
#include "failure.h"
#include "log_queue.h"
#include "page.h"
#include "peer_table.h"

namespace ddpx::health {

// Returns the params of one wrapper whose gradients have not come, and none if they are unknown.
// Called on the thread of the watchdog. Must not wait.
using MissingParams = std::function<std::vector<std::string>()>;

// The failure detector of one rank in one process group. Owned by the watchdog, whose thread calls
// look() five times a second, until the group is gone. Thread-safe. Only calls whose comments say
// so wait, and only after an error or a lost lease.
class Monitor : public std::enable_shared_from_this<Monitor> {
 public:
  struct Group {
    int rank = 0;
    int world_size = 1;
    std::string identity;                // see Introduction::own
    std::function<bool()> gone;          // the process group was destroyed
    std::function<void()> abort;         // ends waits in collective calls of the group
    std::function<uint64_t()> sequence;  // number of calls to the group; 0: not counted
    bool same_sequence = false;          // ranks with the same calls have the same `sequence`
    int64_t lease_ns = 15'000'000'000;   // see HostChannel; the same on all ranks
    bool survivors_live_on = false;      // the launcher does not end survivors
  };

  static std::shared_ptr<Monitor> create(Group group, StoreAccess store);
  ~Monitor();

  // ---- for reducers --------------------------------------------------------------------------

  // Numbers of wrappers of this group, for model_of(): of the wrapper that all ranks have just
  // constructed, and of another wrapper that is about to make its first collective call.
  uint32_t number_of_constructed() const;
  uint32_t next_number();
  void set_missing_params(uint8_t model, MissingParams missing_params);

  OwnPage& page() {
    return page_;
  }
  PeerTable& peers() {
    return peers_;
  }
  const PeerTable& peers() const {
    return peers_;
  }
  const Introduction& own() const {
    return own_;
  }

  // The start in a collective call of the group. All ranks exchange introduction(), then the
  // results of find_host(): 0 for ranks without a monitor. Without such a call, or before it, ranks
  // meet through the store. For one thread.
  std::string introduction() const;  // empty once ranks have met in this way
  uint64_t find_host(const std::vector<std::string>& introductions);
  void meet(const std::vector<uint64_t>& hosts);

  // Lets ranks meet through the store at once.
  void introduce() {
    threads_->introduce();
  }
  // Adds ranks that have become known to the table of peers.
  void meet();
  uint64_t sequence() const {
    return group_.sequence();
  }
  bool same_sequence() const {
    return group_.same_sequence;
  }

  // Whether the group cannot continue.
  bool failed() const {
    return failed_.load(std::memory_order_acquire);
  }
  void raise_if_failed(const std::string& said = {});

  // Whether this rank has raised the failure.
  bool has_raised() const {
    return page_.view().presence() == Presence::kFailing;
  }

  // Declares that ranks make different collective calls, and raises. All ranks raise this.
  [[noreturn]] void raise_mismatch(const std::string& how);

  // After a collective call has failed with the text `said`. Waits until the cause is found, for
  // some seconds at most. Raises if ranks are lost or late. Returns if all ranks live.
  void explain_error(const std::string& said);

  // Waits while other hosts may have declared this host lost. Throws the failure if they have, or
  // if the store does not tell. One atomic load where all ranks are on one host.
  void await_lease() {
    if (has_lease_.load(std::memory_order_relaxed)) {
      await_lease_of_host();
    }
  }

  // Throws in a process that was forked off from the one that made this. No system call.
  void check_process() const;

  int rank() const {
    return group_.rank;
  }

  // Publishes what the Python part does: the construction of a wrapper, each collective call of a
  // construction, and waits for buffers.
  void begin_construction();
  void begin_call();  // has no effect outside a construction
  void end_call();
  void note(Doing doing);

  // ---- for reports ---------------------------------------------------------------------------

  // The failure as this rank raises it. nullopt if the group has not failed.
  std::optional<RankReport> report() const;

  // Asks another rank of this machine for its Python stacks, and waits for the answer. nullopt if
  // there is none in time.
  std::optional<std::string> stack_of(int rank, std::chrono::milliseconds timeout) const;
  void answer_stack_request(const std::string& stack);

  // The token of this rank's page.
  uint64_t token() const {
    return token_;
  }

  // Writes a text that other ranks of this machine read at Peer::page().
  void write_note(const std::string& text);

  // ---- the end of this rank ------------------------------------------------------------------

  // The script ends with an error. With several hosts, waits until the store has the failure, or
  // until `deadline`; see delivery_deadline().
  void fail(const std::string& cause, std::chrono::steady_clock::time_point deadline);
  static std::chrono::steady_clock::time_point delivery_deadline();

  // Waits until other hosts have read what this rank posted, since the store may end with this
  // process.
  void await_delivery() const;

  // The script, or the group, has ended without an error.
  void leave();

  // This process has got SIGTERM.
  void mark_terminated() {
    page_.mark_terminated();
  }

  // Another group has replaced this group. Watching and reports end.
  void retire() {
    retired_ = true;
  }

  // ---- for the watchdog ------------------------------------------------------------------------

  bool gone() const {
    return retired_ || group_.gone();
  }
  // Descriptors that become readable when a peer ends.
  std::vector<int> ends_of_peers() const;
  void look();

 private:
  static constexpr int64_t kStoppedNs = 1'500'000'000;  // without a look: looks are five a second

  Monitor(Group group, uint64_t token);
  class Probe;

  // The wait that goes on.
  struct Stall {
    int64_t since_ns = 0;  // 0: this rank waits for no other
    int64_t waited_ns = 0;
    int64_t next_warning_ns = 0;  // after the start of the wait; 0: no warning yet
    int64_t asked_ns = 0;         // when other hosts were first asked for their states
    std::vector<int> missing;     // ranks, at the last warning
  };

  void start(StoreAccess store);
  void await_lease_of_host();
  void want_states();
  std::optional<Failure> find_declared() const;
  void declare(Failure failure);
  std::optional<Failure> find_cause(int64_t start_ns, bool silence_counts) const;
  std::optional<Failure> find_store_lost(StoreState least) const;
  std::optional<Failure> find_failure(bool also_left) const;
  bool is_terminated() const;
  int64_t waited_ns(const Activity& own) const;
  void look_for_failures();
  void look_for_stalls();
  void warn_of_stall(const Activity& own);
  void warn_of_end(const Stall& stall) const;
  std::optional<Failure> find_stall(
      const Activity& own, int64_t waited_ns, const std::vector<int>& missing) const;
  std::vector<int> most_to_blame(std::vector<int> missing) const;
  std::optional<std::string> uneven_sequences(const Activity& own) const;
  void look_at_self();
  void log(Level level, const char* event, std::string message, int about) const;

  const Group group_;
  const pid_t owner_;
  const uint64_t forks_;  // when it was made
  const uint64_t token_;
  OwnPage page_;
  const Introduction own_;
  PeerTable peers_;
  std::shared_ptr<ChannelThreads> threads_;
  std::vector<Introduction> met_;  // ranks that met in a collective call
  bool has_met_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable declared_;
  uint32_t num_others_ = 0;
  std::map<uint8_t, MissingParams> missing_params_;  // by model, of the newest wrapper
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  std::atomic<std::chrono::steady_clock::time_point> heard_by_{};
  std::atomic<uint32_t> num_constructions_{0};
  std::atomic<bool> retired_{false};
  std::atomic<bool> has_lease_{false};  // where there are several hosts
  std::atomic<int64_t> awake_ns_{0};    // since when this process has not been stopped

  // Of the watchdog's thread.
  Stall stall_;
  int64_t looked_ns_ = 0;
  uint32_t num_stacks_served_ = 0;
};

}  // namespace ddpx::health
