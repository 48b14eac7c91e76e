// The local ranks from the view of one of them: their memory, and whether they are alive.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "rendezvous.h"

namespace ddpx::shm {

// A rank (of the whole group) that is gone, and the reason: "died …", "left the group …".
struct Loss {
  int rank;
  std::string what;
};

// All local ranks of a group. Owned by its Team. The thread that executes operations calls it.
// Exceptions: the thread that posts may call `announce` at the same time, and any thread may call
// `loss_of` and `losses`. It needs no lock. Indices are local ranks.
class Peers {
 public:
  Peers(RendezvousResult rendezvous, int rank);

  int size() const {
    return static_cast<int>(local_peers_.size());
  }

  int own_index() const {
    return own_index_;
  }

  // The rank in the whole group that belongs to a local rank.
  int rank_of(int index) const {
    return ranks_[index];
  }

  const Topology& topology() const {
    return topology_;
  }

  const HomeSegment& segment(int index) const {
    return *local_peers_[index].home;
  }

  Home& home(int index) const {
    return segment(index).home();
  }

  Home& own_home() const {
    return home(own_index_);
  }

  // All local ranks use that of local rank 0.
  SharedState& shared_state() const {
    return home(0).shared;
  }

  // The reason why a peer is gone, or nullopt if the peer is alive.
  std::optional<std::string> loss_of(int index) const;

  // All peers that are gone.
  std::vector<Loss> losses() const;

  // Passes a segment of this rank's arena to all peers, unless they have it. Must come before an
  // operation that refers to the segment. Throws kPeerLost if a peer cannot receive it.
  void announce(const Arena& arena, uint32_t segment);

  // The address of a peer's buffer. Maps the segment if necessary. Throws kPeerLost if the peer did
  // not pass the segment.
  std::byte* locate(int index, const BufferRef& buffer);

 private:
  void receive_segment(int index);

  Topology topology_;
  std::vector<int> ranks_;
  std::vector<LocalPeer> local_peers_;
  std::vector<UniqueFd> processes_;                                     // pidfds, by local rank
  std::vector<std::map<uint32_t, std::shared_ptr<Mapping>>> segments_;  // by local rank
  int own_index_;
  std::vector<uint32_t> announced_;  // ids of the own segments that peers have mapped
};

}  // namespace ddpx::shm
