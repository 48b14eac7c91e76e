// Steps synchronize the local ranks.
//
// Ranks run operations one after another, in the same order on every rank. An operation consists of
// *steps*. A rank *arrives* at a step when it has written its share of the data before the step. A
// rank *awaits* a step: the wait ends when all ranks have arrived. Then the rank may read what the
// other ranks wrote before their arrival.
//
// One counter of arrivals serves all steps. A rank arrives at step n+1 only after step n is
// complete. Step n is therefore complete at a count of n x ranks (modulo 2^32; only differences
// count). Hence a rank is at most one step, and at most one operation, ahead of the slowest rank.
#pragma once

#include <atomic>
#include <exception>
#include <optional>
#include <string>

#include "failure.h"
#include "peers.h"
#include "spin_policy.h"

namespace ddpx::shm {

// The operation for which a rank waits, and the time limit.
struct WaitContext {
  const Descriptor& descriptor;
  Clock::time_point deadline;
  std::chrono::milliseconds timeout;  // the timeout that gave the deadline, for error texts
};

// The steps of one rank. Owned by its Team. One thread at a time arrives and awaits. Any thread may
// call `cancel` and the functions about failures. It needs no lock.
class Steps {
 public:
  Steps(Peers& peers, SpinPolicy spin_policy);

  // Releases all data that this rank has written.
  void arrive();

  // Acquires all data that the ranks wrote before they arrived. Throws if the step cannot be
  // completed: kPeerLost, kTimeout, or an earlier failure of the group. The group has then failed
  // on all ranks.
  void await(const WaitContext& context);

  // Fails the group on all ranks; only the first failure is kept. Returns that failure as the error
  // of this rank.
  Error fail(const Failure& failure, const std::string& phase);

  // The same for the exception that is being handled, of any type. Recording the failure allocates
  // no memory, since the exception may be std::bad_alloc. Returns the error of this rank, or the
  // exception itself if there is no memory for an error. `phase` names the current work of this
  // rank.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept;

  // The failure of the group as the error of this rank; nullopt if there is none.
  std::optional<Error> failure(const std::string& phase) const;

  // Throws the failure of the group if there is one. `current` is the operation of this rank.
  void check(const Descriptor& current) const;

  // Ends the current wait and all later waits of this rank with kAborted. Other ranks do not fail.
  void cancel();

 private:
  bool complete() const;
  bool has_arrived(int index) const;
  bool awaited_rank_was_on_this_core() const;
  std::vector<int> missing() const;
  bool spin() const;
  bool interrupted() const;
  void check_peers(const WaitContext& context);
  Error error_of(const Failure& failure, const std::string& phase) const;

  Peers& peers_;
  StepCounter& counter_;
  SpinPolicy spin_policy_;
  uint32_t complete_count_ = 0;  // the count at which the current step is complete
  uint32_t own_steps_ = 0;       // number of steps at which this rank has arrived
  uint32_t checked_left_ = 0;    // the ranks that had left at the last check of the peers
  int previous_on_core_ = -1;    // the local rank that arrived before this one on the same core
  std::size_t num_checks_ = 0;   // of peers
  std::atomic<bool> cancelled_{false};
};

}  // namespace ddpx::shm
