// What the algorithms of the operations see of the group: ranks, buffers, steps.
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
  Patience patience;
};

// One operation after another: post, then execute. One thread at a time posts, and one executes.
class Team {
 public:
  Team(Meeting meeting, int rank, const TeamOptions& options, std::shared_ptr<Arena> arena);

  // The first step of an operation: says what this rank calls, and for a small one hands over its
  // input. Does not wait. Only once the operation before is over on this rank. If it fails, the
  // group has failed, and `execute` throws.
  void post(const Call& call, uint64_t sequence) noexcept;

  // Waits for the others and does the work. Throws if that fails; then the group has failed,
  // whatever the exception is: a rank that leaves out a step must not make the ones after it.
  void execute(const Call& call);

  // Tells the others that this rank will not take part any more.
  void leave();

  Peers& peers() {
    return peers_;
  }

  Steps& steps() {
    return steps_;
  }

  // ---- for the algorithms, while an operation is executed

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

  // What local rank `index` handed over when it posted.
  const std::byte* one_shot(int index) const {
    return peers_.segment(index).one_shot(sequence_);
  }

  // Staging is in two halves that are used by turns, from piece to piece and over the ends of
  // operations. There is at least one step in every piece, so a half is free when its turn comes:
  // who reads it does so before arriving at the step of the next piece.
  int next_half() {
    return static_cast<int>(num_pieces_++ & 1);
  }

  std::byte* input_area(int index, int half) const {
    return peers_.segment(index).input_area(half);
  }

  std::byte* result_area(int index, int half) const {
    return peers_.segment(index).result_area(half);
  }

  // Whether the buffers that ranks named in their descriptors are all in arenas (of `root` alone,
  // if one is given), and where they are.
  bool all_resident() const;
  bool resident(int index) const;
  std::byte* resident_buffer(int index);

  void step();

 private:
  const Descriptor& descriptor(int index) const {
    return peers_.home(index).ring[sequence_ % kRing];
  }

  Failure failure_of(const Error& error) const;
  void take_first_step(const Call& call, uint64_t sequence);
  void share_buffer(const Call& call, Descriptor& descriptor);
  void carry_out(const Call& call);
  void check_match();
  void dispatch(const Call& call);

  Peers peers_;
  TeamOptions options_;
  std::shared_ptr<Arena> arena_;
  Steps steps_;
  uint64_t sequence_ = 0;    // of the operation that was posted last
  uint64_t num_pieces_ = 0;  // that were staged so far, by all operations
  std::chrono::milliseconds timeout_{0};
  Clock::time_point deadline_;
};

}  // namespace ddpx::shm
