// The local ranks, as one of them sees them: their memory, and whether they are alive.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "rendezvous.h"

namespace ddpx::shm {

// A rank (of the whole group) that is gone, and what became of it: "died", "left the group".
struct Loss {
  int rank;
  std::string what;
};

// Indices are local ranks. Called by the one thread that executes operations, but for `announce`,
// which the thread that posts may call at the same time, and what tells of losses: any may ask.
class Peers {
 public:
  Peers(Meeting meeting, int rank);

  int size() const {
    return static_cast<int>(neighbours_.size());
  }

  int own_index() const {
    return own_index_;
  }

  // The rank, in the whole group, of a local rank.
  int rank_of(int index) const {
    return ranks_[index];
  }

  const Topology& topology() const {
    return topology_;
  }

  const HomeSegment& segment(int index) const {
    return *neighbours_[index].home;
  }

  Home& home(int index) const {
    return segment(index).home();
  }

  Home& own_home() const {
    return home(own_index_);
  }

  // All use local rank 0's.
  Board& board() const {
    return home(0).board;
  }

  // What became of a peer: "died", "left the group"; nothing while it is there.
  std::optional<std::string> loss_of(int index) const;

  // Of all peers.
  std::vector<Loss> losses() const;

  // Hands a segment of this rank's arena to all peers, once; before an operation refers to it.
  void announce(const Arena& arena, uint32_t segment);

  // A peer's buffer, mapped if it was not. Throws kPeerLost if the peer did not hand it over.
  std::byte* locate(int index, const BufferRef& buffer);

 private:
  void receive_segment(int index);

  Topology topology_;
  std::vector<int> ranks_;
  std::vector<Neighbour> neighbours_;
  std::vector<UniqueFd> processes_;                                     // per neighbour
  std::vector<std::map<uint32_t, std::shared_ptr<Mapping>>> segments_;  // per neighbour
  int own_index_;
  std::vector<uint32_t> announced_;  // ids of own segments that peers have
};

}  // namespace ddpx::shm
