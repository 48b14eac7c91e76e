// Communication between the hosts of a process group through the store, with leases.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../machine/host_table.h"
#include "../machine/introduction.h"
#include "store.h"

namespace ddpx::health {

// The questions of the channel about processes of its machine, and about failures. Owned by the
// channel, whose threads call it. GroupState implements it, and the simulation.
class HostProbe {
 public:
  virtual ~HostProbe() = default;

  // The table on the status page of a rank. Null if this process cannot open the page.
  virtual std::shared_ptr<HostTable> open(const Introduction& rank) = 0;

  // Whether a rank of this host can be the keeper.
  virtual bool lives(int rank) = 0;

  // The record of a failure: these ranks are lost with their hosts.
  virtual std::string describe_lost(const std::vector<int>& ranks, int64_t silent_ns) = 0;

  // Collective calls of recent steps, for the next host of the ring.
  virtual std::string calls() = 0;

  // Compares the calls of another host with the calls of this rank. Returns the record of a failure
  // if they differ.
  virtual std::optional<std::string> compare_calls(int rank, const std::string& calls) = 0;
};

// The channel of one rank, without threads. Owned by ChannelThreads. The ranks of a host share a
// HostTable. One rank of each host, the keeper, makes the requests to the store. A *lease* is the
// time without a message after which other hosts declare a host lost.
//
// One thread calls step(), introduce(), post_failure() and leave(). One other thread calls
// listen(). Any thread calls the other functions. step(), listen(), post_failure() and leave() need
// a table().
class HostChannel {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  struct Settings {
    Introduction own;
    int world_size = 1;
    int64_t lease_ns = times::kLease;
  };
  using Clock = std::function<int64_t()>;  // nanoseconds; goes on while the machine is suspended

  HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now);

  const Settings& settings() const {
    return settings_;
  }

  // The start in a collective call. All ranks exchange their introductions, and then the results of
  // find_host(): the token of the host of each rank, or 0 for a rank without a monitor.
  uint64_t find_host(const std::vector<Introduction>& ranks);
  void meet(const std::vector<Introduction>& ranks, const std::vector<uint64_t>& hosts);

  // The start through the store. Afterwards, step() waits for the other ranks.
  void introduce(Store& store);
  bool must_introduce() const;

  // The table of the host of this rank. Null before the host is decided.
  std::shared_ptr<HostTable> table() const {
    return is_decided_.load(std::memory_order_acquire) ? table_ : nullptr;
  }

  // Whether this rank must call step(): it is the keeper, or must take over from the keeper.
  bool should_keep() const;

  // Makes the requests that are due. Returns the time of the next call, or kNever if this rank is
  // no longer the keeper.
  int64_t step(Store& store);

  // Handles new events. Returns whether there were new events.
  bool listen(Store& store);

  // A host that has posted an event sets this key of each other host.
  std::string wake_key() const;

  // Posts a failure to all hosts, unless a failure was posted before.
  void post_failure(Store& store, const std::string& text);

  // This rank leaves without an error. If this rank is the keeper, other hosts do not watch its
  // host until another rank has taken over. If this rank serves the store, the end of the store is
  // no failure from now on.
  void leave(Store& store, bool serves_store);

 private:
  enum class EventKind : uint8_t { kUnknown, kFailure, kRequest, kLeaving };

  struct Host {
    uint64_t token = 0;
    std::vector<int> ranks{};   // sorted
    std::string message{};      // the last message
    std::string calls{};        // in that message
    bool has_left = false;      // the keeper has left, and no other rank has taken over
    bool has_answered = false;  // the request of this host for messages, since it was cut off
    int64_t checked_ns = 0;
    int64_t silent_ns = 0;  // time without a new message, while the store answered in time
  };

  // The start.
  bool join(const std::vector<Introduction>& ranks);
  std::shared_ptr<HostTable> find_table(const std::vector<Introduction>& ranks) const;
  void end_start();
  int64_t gather(Store& store);
  bool read_ranks(Store& store);
  void build_ring();

  // Events.
  void post(Store& store, EventKind kind, const std::string& text);
  EventKind handle(uint32_t number, std::string_view event);
  bool post_declared(Store& store);

  // The lease of this host, and the leases of other hosts.
  void renew(Store& store);
  void write(Store& store, const std::string& message);
  void check(Store& store);
  void read(Store& store, std::span<Host> hosts);
  std::set<uint64_t> read_hosts(Store& store) const;
  void absorb(Host& host, const std::string& message);
  void declare_lost(Store& store, const std::function<bool(const Host&)>& is_lost);
  std::size_t num_watched() const;
  std::string message(int64_t counter) const;
  bool is_wanted() const;
  int64_t period_ns() const;

  const Settings settings_;
  const std::shared_ptr<HostProbe> probe_;
  const Clock now_;
  std::mutex join_mutex_;  // guards the decision
  std::shared_ptr<HostTable> table_;
  std::atomic<bool> is_decided_{false};  // `table_` is final
  std::atomic<bool> is_introduced_{false};
  std::atomic<int64_t> renewal_ns_{0};  // when the next renewal of the lease is due
  std::atomic<int64_t> fast_until_ns_{0};

  // For the thread that calls step().
  struct Keeper {
    std::vector<Host> others;   // from the next host of the ring on
    std::set<uint64_t> listed;  // hosts that have written a message
    bool is_prompt = true;      // the store answered in time
    int64_t num_read = 0;       // ranks that had introduced themselves when the list was read
    int64_t check_ns = 0;
    int64_t read_all_ns = 0;  // when all hosts may be read again for a rank that waits
    int64_t cut_off_ns = 0;   // when this host detected the end of its lease; 0: it has its lease
    uint32_t request_event = 0;  // a host that has handled this event was alive after `cut_off_ns`
  } keeper_;
};

}  // namespace ddpx::health
