// The local ranks from the view of one of them: their memory, and whether they are alive.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "error.h"
#include "rendezvous.h"

namespace ddpx::shm {

// All local ranks of a group. Owned by its Team. The thread that executes operations calls it. It
// needs no lock. Indices are local ranks.
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

  // For texts: the name of a local rank.
  std::string name_of(int index) const {
    return topology_.name({rank_of(index)});
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

  // The reason why a peer is gone, or nullopt if the peer is alive. Makes system calls.
  std::optional<std::string> loss_of(int index) const;

  // Whether a peer has destroyed its group. Makes no system call.
  bool has_left(int index) const;

  // Called from time to time while the two functions below wait for peers. Throws to end the wait.
  using Check = std::function<void()>;

  // Passes a segment of this rank's arena to all peers, unless they have it. All ranks must call
  // this and `locate` in the same operation. Throws kPeerLost if a peer is gone.
  void announce(const Arena& arena, uint32_t segment, const Check& check);

  // The address of a peer's buffer of this size. Receives and maps the segment if necessary. Throws
  // kPeerLost if the peer is gone, and kSystem if the buffer is not in the segment.
  std::byte* locate(int index, const BufferRef& buffer, std::size_t num_bytes, const Check& check);

 private:
  Error lost(int index) const;
  void receive_segments();
  bool receive_segment(int index, Clock::time_point deadline);

  Topology topology_;
  std::vector<int> ranks_;
  std::vector<LocalPeer> local_peers_;
  std::vector<std::map<uint32_t, std::shared_ptr<os::Mapping>>> segments_;  // by local rank
  int own_index_;
  std::vector<uint32_t> announced_;  // ids of the own segments that peers have mapped
};

}  // namespace ddpx::shm
