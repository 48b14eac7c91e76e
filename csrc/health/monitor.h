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

#include "calls.h"
#include "channel_threads.h"
#include "failure.h"
#include "log_queue.h"
#include "page.h"
#include "peer_table.h"

namespace ddpx::health {

// Returns the params of one wrapper whose gradients have not come, and none if they are unknown.
// Called on the thread of the watchdog. Must not wait.
using MissingParams = std::function<std::vector<std::string>()>;

// Made for a group, and kept until the group is gone or the process ends. Reducers note on `page`
// what they do; the watchdog's thread calls `look` a few times a second. Nobody waits for a monitor
// but who has met an error, or waits for a peer anyway. Thread-safe.
class Monitor : public std::enable_shared_from_this<Monitor> {
 public:
  struct Group {
    int rank = 0;
    int world_size = 1;
    std::string identity;                // see Introduction::own
    std::function<bool()> gone;          // the process group was destroyed
    std::function<void()> abort;         // lets go who waits in its collective calls
    std::function<uint64_t()> sequence;  // number of calls made to it; 0: not counted
    bool same_sequence = false;          // on all ranks, if these make the same collective calls
    int64_t lease_ns = 15'000'000'000;   // see HostChannel; the same on all ranks
    bool survivors_live_on = false;      // the launcher does not end them
  };

  static std::shared_ptr<Monitor> create(Group group, StoreAccess store);
  ~Monitor();

  // ---- for reducers --------------------------------------------------------------------------

  // Numbers for wrappers over this group, to which model_of() belongs: of the one that all ranks
  // have just constructed, and of another one that is about to make its first collective call.
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
  // Adds ranks that have become known to the peers.
  void meet();
  uint64_t sequence() const {
    return group_.sequence();
  }

  // The group cannot go on.
  bool failed() const {
    return failed_.load(std::memory_order_acquire);
  }
  void raise_if_failed(const std::string& said = {});

  // Whether that, or an error's explanation, has raised already.
  bool has_raised() const {
    return page_.view().presence() == Presence::kFailing;
  }

  // This rank has found that ranks make different collective calls: all raise it. Raises.
  [[noreturn]] void raise_mismatch(const std::string& how);

  // An error has come out of a collective call, which `said` something: raises if ranks are gone,
  // as may show only now; returns if all are there.
  void explain_error(const std::string& said);

  // A step has come to its end: other hosts may compare it with theirs.
  void add_sample(const StepCalls& calls) {
    if (has_lease_.load(std::memory_order_relaxed)) {
      samples_.add(calls);
    }
  }

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

  // For what no reducer does: wrapping a model, and each collective call in that; waiting for
  // buffers, where the step stays the same.
  void begin_construction();
  void begin_call();  // nothing elsewhere
  void end_call();
  void note(Doing doing);

  // ---- for those who look --------------------------------------------------------------------

  // What this rank would raise now; none if nothing has failed.
  std::optional<RankReport> report() const;

  // The Python stack of another rank of this machine: asks it. None if it does not answer in time.
  std::optional<std::string> stack_of(int rank, std::chrono::milliseconds timeout) const;
  void answer_stack_request(const std::string& stack);

  // Of this rank's page.
  uint64_t token() const {
    return token_;
  }

  // A text for the other ranks of this machine, which find it at Peer::page().
  void write_note(const std::string& text);

  // ---- the end of this rank ------------------------------------------------------------------

  // Its script ends with an error. Where the store has to be told it waits for that until then, at
  // most; see delivery_deadline().
  void fail(const std::string& cause, std::chrono::steady_clock::time_point deadline);
  static std::chrono::steady_clock::time_point delivery_deadline();

  // Until others have heard of that: the store may end with this process.
  void await_delivery() const;

  // Its script, or its group, has come to its end.
  void leave();

  // SIGTERM has come: this rank ends, though nothing may be wrong with it.
  void mark_terminated() {
    page_.mark_terminated();
  }

  // Another group has taken this one's place: there is nothing to watch or to report any more.
  void retire() {
    retired_ = true;
  }

  // ---- for the watchdog ------------------------------------------------------------------------

  bool gone() const {
    return retired_ || group_.gone();
  }
  // Descriptors that become ready when a peer ends.
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
  CallSamples samples_;
  std::unique_ptr<ChannelThreads> threads_;
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
