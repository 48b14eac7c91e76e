// Another rank of the group, from the view of this rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../../os/process.h"
#include "introduction.h"
#include "page.h"

namespace ddpx::health {

// Owned by the table of peers. Immutable, and thread-safe.
class Peer {
 public:
  // A peer is local if this process can open its status page, or finds its process with the claimed
  // start time. Copies of a virtual machine claim to be the same machine. `host` is the table of
  // this rank's host.
  Peer(
      Introduction introduction, const os::ProcessId& self, const std::shared_ptr<HostTable>& host);

  int rank() const {
    return introduction_.rank;
  }
  const Introduction& introduction() const {
    return introduction_;
  }
  bool local() const {
    return watch_.has_value();
  }
  // Null if the peer is not local.
  const os::ProcessWatch* watch() const {
    return watch_ ? &*watch_ : nullptr;
  }
  // Null if this process cannot open the page.
  StatusPage* page() const {
    return page_.get();
  }

  // Whether the process has ended, and whether a signal has stopped it. False if unknown.
  bool ended() const {
    return local() && watch_->ended();
  }
  bool stopped() const {
    return local() && watch_->state() == 'T';
  }
  // kLeft or kThere if this process cannot open the page.
  Presence presence() const;

  // nullopt if unknown. For a rank of another host, the last activity that its host wrote.
  std::optional<Activity> activity() const;

  // The number of calls that the rank has made to the group. 0: unknown.
  uint64_t num_calls() const;

  // The activity of the device in a step that the host has ended; see DeviceProgress. nullopt if
  // the device is idle, or if this process cannot open the page.
  std::optional<Activity> device() const;

  // When the host of the rank last wrote a message; 0 for ranks of this host.
  int64_t heard_ns() const;

 private:
  const Introduction introduction_;
  const std::shared_ptr<const HostTable::Rank> entry_;  // in the table of this rank's host
  std::optional<os::ProcessWatch> watch_;
  std::shared_ptr<StatusPage> page_;
};

// Asks a rank of this machine for its Python stacks, and waits for the answer. nullopt if there is
// none in time, or if this rank cannot open the page of `peer`. `peer` may be null.
std::optional<std::string> request_stack(const std::shared_ptr<Peer>& peer, int64_t timeout_ns);

// The status page of a rank; null if this process cannot open it.
std::shared_ptr<StatusPage> open_page(const Introduction& rank, int world_size);

}  // namespace ddpx::health
