// How local ranks wait for each other.
//
// Operations are carried out one after another, in the same order on every rank, and consist of
// *steps*. A rank *arrives* at a step when its share of what lies before it is written, and
// *awaits* it: all ranks have arrived, and what they wrote before can be read. A single counter of
// arrivals serves all steps: a rank arrives at step n+1 only after step n is complete, so step n is
// complete when the count has reached n x ranks (modulo 2^32; only differences count).
//
// Hence a rank is at most one step ahead of the slowest, and at most one operation.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "failure.h"
#include "patience.h"
#include "peers.h"

namespace ddpx::shm {

// What a rank is doing while it waits.
struct Waiting {
  const Descriptor& descriptor;
  Clock::time_point deadline;
  std::chrono::milliseconds timeout;  // that the deadline was made from
};

// One thread at a time arrives and awaits; the functions about failures, and `give_up`, may be
// called by any.
class Steps {
 public:
  Steps(Peers& peers, Patience patience);

  // The release that publishes all that this rank wrote.
  void arrive();

  // The acquire by which all of it is seen. Throws if the step cannot be completed: kPeerLost,
  // kTimeout, or whatever failed the group. The group has then failed for everyone.
  void await(const Waiting& waiting);

  // Fails the group for all ranks; the first failure stands. Returns the error of this rank.
  Error fail(const Failure& failure, const std::string& phase);

  // The same with the exception that is being handled, whatever it is. Records it without
  // allocating memory, which is what may be missing. Returns the error of this rank, or the
  // exception itself if there is no memory for an error. `phase` is what this rank is at.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept;

  // The group's failure, if there is one, as the error of this rank.
  std::optional<Error> failure(const std::string& phase) const;

  // Throws it. `current` is what this rank is at.
  void check(const Descriptor& current) const;

  // This rank stops waiting, now and later, without failing the others.
  void give_up();

 private:
  bool complete() const;
  bool has_arrived(int index) const;
  bool keeps_peer_from_running() const;
  bool look_briefly() const;
  void check_on_peers(const Waiting& waiting);
  Error error_of(const Failure& failure, const std::string& phase) const;

  Peers& peers_;
  StepCounter& counter_;
  Patience patience_;
  uint32_t awaited_ = 0;  // the count at which the step that was arrived at is complete
  uint32_t own_steps_ = 0;
  std::atomic<bool> given_up_{false};
};

}  // namespace ddpx::shm
