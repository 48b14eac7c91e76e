// The local ranks of a group as the algorithms see them: ranks, buffers and steps.
#pragma once

#include <cstring>

#include "arena.h"
#include "call.h"
#include "peers.h"
#include "steps.h"

namespace ddpx::shm {

struct TeamOptions {
  Order order;
  std::chrono::milliseconds timeout;
  SpinPolicy spin_policy;
};

// Runs one operation after another: post, then execute. Owned by the OperationQueue, which makes
// sure that one thread at a time posts and one thread at a time executes. It has no lock of its
// own.
class Team {
 public:
  Team(
      RendezvousResult rendezvous,
      int rank,
      const TeamOptions& options,
      std::shared_ptr<Arena> arena);

  // Arrives at the first step of an operation: publishes the descriptor, and the input of a small
  // operation. Does not wait. The previous operation must have ended on this rank. A failure fails
  // the group, and `execute` throws it.
  void post(const Call& call, uint64_t sequence) noexcept;

  // Waits for the other ranks and runs the operation. Every exception fails the group, since a rank
  // that leaves out a step must not make later steps. Throws the error of this rank.
  void execute(const Call& call);

  // Marks this rank as gone, so that peers stop waiting for it.
  void leave();

  Peers& peers() {
    return peers_;
  }

  Steps& steps() {
    return steps_;
  }

  // ---- for the algorithms, while an operation runs

  int size() const {
    return peers_.size();
  }

  int own_index() const {
    return peers_.own_index();
  }

  Order order() const {
    return options_.order;
  }

  std::size_t one_shot_bytes() const {
    return peers_.segment(own_index()).sizes().one_shot_bytes;
  }

  std::size_t piece_bytes() const {
    return peers_.segment(own_index()).sizes().piece_bytes;
  }

  std::size_t result_bytes() const {
    return peers_.segment(own_index()).result_bytes();
  }

  // The input that local rank `index` copied in its `post`.
  const std::byte* one_shot(int index) const {
    return peers_.segment(index).one_shot(sequence_);
  }

  // The two halves of the staging buffer alternate from piece to piece, also across operations.
  // Every piece has at least one step, and a rank reads a half before it arrives at the step of
  // the next piece. A half is therefore free when its turn comes.
  int next_half() {
    return static_cast<int>(num_pieces_++ & 1);
  }

  std::byte* input_area(int index, int half) const {
    return peers_.segment(index).input_area(half);
  }

  std::byte* result_area(int index, int half) const {
    return peers_.segment(index).result_area(half);
  }

  // The address in this process of the buffer of local rank `index`. Null unless it is in an arena.
  std::byte* resident_buffer(int index) const {
    return buffers_[index];
  }

  bool all_resident() const;

  // Arrives at the next step and awaits it.
  void step();

 private:
  const Descriptor& descriptor(int index) const {
    return peers_.home(index).ring[sequence_ % kRing];
  }

  Failure failure_of(const Error& error) const;
  void take_first_step(const Call& call, uint64_t sequence);
  void carry_out(const Call& call);
  void check_match();
  void locate_buffers(const Call& call);
  void dispatch(const Call& call);

  Peers peers_;
  TeamOptions options_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::byte*> buffers_;  // by local rank: the buffers in arenas, null for others
  Steps steps_;
  uint64_t sequence_ = 0;    // sequence number of the last posted operation
  uint64_t num_pieces_ = 0;  // pieces that all operations so far have staged
  std::chrono::milliseconds timeout_{0};
  Clock::time_point deadline_;
};

}  // namespace ddpx::shm
