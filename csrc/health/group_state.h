// The state of one rank in its process group. The parts of a monitor share it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hosts/channel_threads.h"
#include "log_queue.h"
#include "machine/page.h"
#include "verdict/peer_table.h"

namespace ddpx::health {

// A process group, as its backend and its launcher describe it.
struct WatchedGroup {
  int rank = 0;
  int world_size = 1;
  std::string name;
  std::string identity;         // see Introduction::own
  std::function<bool()> gone;   // the process group was destroyed
  std::function<void()> abort;  // ends waits in collective calls of the group; may take long
  bool on_device = false;       // calls run on a device, and hosts do not wait for them
  std::function<int64_t()> timeout_ns = [] { return int64_t{0}; };  // of each call; 0: unknown
  std::function<bool()> has_error = [] { return false; };  // on a device: a call has failed
  // The number of calls to the group; 0: not counted.
  std::function<uint64_t()> sequence = [] { return uint64_t{0}; };
  bool same_sequence = false;        // ranks with the same calls have the same `sequence`
  int64_t lease_ns = times::kLease;  // see HostChannel; the same on all ranks
  bool survivors_live_on = false;    // the launcher does not end survivors
};

// The abort of a group after a failure.
struct Abort {
  std::atomic<bool> has_begun{false};  // results of calls may be wrong from now on
  std::atomic<bool> has_ended{false};  // all calls have ended
};

// Owned by the monitor. The channel holds it weakly, since its threads may wait for the store for
// longer than the group lives. Thread-safe. No method waits.
class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  static std::shared_ptr<GroupState> create(WatchedGroup group, StoreAccess store);
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  // ---- the start -------------------------------------------------------------------------------

  // The start in a collective call of the group. All ranks exchange introduction(), then the
  // results of find_host(): 0 for ranks without a monitor. Without such a call, or before it, ranks
  // meet through the store. For one thread.
  std::string introduction() const;  // empty once ranks have met in this way
  uint64_t find_host(const std::vector<std::string>& introductions);
  void meet(const std::vector<std::string>& introductions, const std::vector<uint64_t>& hosts);

  // Adds ranks that have become known to the table of peers.
  void meet();

  // ---- hosts -----------------------------------------------------------------------------------

  // Null before the host of this rank is decided. Lives as long as this object.
  HostTable* table() const {
    return channel->table();
  }
  // kGathering before the host of this rank is decided.
  HostTable::Stage stage() const {
    const auto* known = table();
    return known == nullptr ? HostTable::Stage::kGathering : known->stage.load();
  }
  // Whether there are several hosts.
  bool has_lease() const {
    return stage() == HostTable::Stage::kManyHosts;
  }
  // Writes this rank's activity and number of calls into the table of its host, for other hosts.
  void publish_to_hosts();
  // Asks other hosts for new states.
  void want_states();

  // ---- this rank -------------------------------------------------------------------------------

  Activity activity() const {
    return page.view().activity();
  }
  // Publishes the number of calls that this rank has made to the group, if ranks with the same
  // calls have the same number.
  void publish_calls();
  // Whether this process has got SIGTERM. Then all ranks of the job end one after the other, and no
  // rank is to blame.
  bool is_terminated() const {
    return page.view().presence() == Presence::kTerminated;
  }
  // Logs a message about this rank or another rank. ddpx/health/log.py has the level of each event.
  void log(const char* event, std::string message, int about) const;

  const WatchedGroup group;
  OwnPage page;
  const Introduction own;
  PeerTable peers;
  std::shared_ptr<ChannelThreads> channel;                         // also owned by its threads
  const std::shared_ptr<Abort> abort = std::make_shared<Abort>();  // also owned by its thread

 private:
  GroupState(WatchedGroup group, uint64_t token);
  class Probe;

  std::atomic<bool> has_met_{false};  // in a collective call
};

}  // namespace ddpx::health
