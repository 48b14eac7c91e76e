// The other ranks of a group: which are known, what they do, which are late.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../machine/names.h"
#include "../machine/peer.h"
#include "failure.h"

namespace ddpx::health {

// Owned by GroupState. Thread-safe. No method waits.
class PeerTable {
 public:
  using Peers = std::vector<std::shared_ptr<Peer>>;

  PeerTable(int rank, int world_size);

  int rank() const {
    return rank_;
  }

  // Adds the peers that have entries in the table of this rank's host.
  void meet(const std::shared_ptr<HostTable>& host, const os::ProcessId& self);
  void add(std::shared_ptr<Peer> peer);

  // All peers, by rank. Null for this rank, and for unknown ranks.
  Peers all() const;
  std::shared_ptr<Peer> peer(int rank) const;
  bool any_remote() const;  // whether a known peer is not local
  bool all_are_known() const;

  // The peers whose status pages this rank can read, in no order.
  std::shared_ptr<const Peers> with_page() const;

  void name_ranks(RankNames names);
  RankNames rank_names() const;

  WrapperNames& names() const {
    return names_;
  }

  // The rank that usually serves the store: rank 0 of the job. nullopt if that rank is not in the
  // group.
  std::optional<int> store_rank() const;

  // Describes this or another rank, which may be unknown.
  LostRank lost_rank(int rank, std::string what) const;

  // The ranks that this rank waits for at `ours`.
  std::vector<int> missing(const Activity& ours) const;
  std::string describe_missing(int rank) const;

  // Whether the hosts of these ranks have written messages since then. True for ranks of this host,
  // and for unknown ranks.
  bool have_written_since(int64_t time_ns, const std::vector<int>& ranks) const;

 private:
  // "step 3, phase forward, stopped by a signal (SIGSTOP)". Empty if unknown.
  std::string last_activity(const Peer& peer) const;

  const int rank_;
  mutable std::mutex mutex_;  // guards the following
  Peers peers_;
  std::shared_ptr<const Peers> with_page_ = std::make_shared<Peers>();
  RankNames rank_names_;
  mutable WrapperNames names_;  // needs no lock
};

}  // namespace ddpx::health
