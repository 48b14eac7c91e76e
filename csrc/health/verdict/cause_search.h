// The search for the reason why a group cannot continue.
#pragma once

#include <cstdint>
#include <optional>

#include "../group_state.h"
#include "wait_search.h"

namespace ddpx::health {

// Why a rank looks for a failure.
enum class Reason {
  kWatches,     // the rank monitors its peers
  kWaits,       // the rank waits for its peers
  kHasNoLease,  // the rank stops before a step: other hosts may have declared its host lost
  kCallFailed,  // a collective call has failed, and other ranks may not have written the cause yet
  kAllHadTime,  // a collective call has failed, and other ranks have had time to write the cause
  kSearchIsOver,  // a collective call has failed, and the search has found no cause
};

// The failure, if there is one. `reason` has lasted since `since_ns`. `wait`: the wait of this
// rank, if this rank waits on its device. Thread-safe. Does not wait.
//
// A time in this table is the least time for which the reason has lasted.
//
//   what counts as a failure         kWatches  kWaits  kHasNo-  kCall-  kAllHad-  kSearch-
//                                                      Lease    Failed  Time      IsOver
//   a rank of the host declared one  yes       yes     yes      yes     yes       yes
//   a process ended, or is failing   yes       yes     yes      yes     yes       yes
//   a rank raised in its step        -         0.3 s6  -        -       -         -
//   a rank has left                  -         0.3 s1  -        yes2    yes2      yes2
//   a host is silent, though asked   -         -       -        -       yes3      yes3
//   a rank is unknown                -         -4      -        -       yes       yes
//   the store has ended              -         0.5 s   yes      -       -         yes5
//   the store is silent for a lease  -         0.5 s   2/3 of   -       -         yes5
//                                                      a lease
//   the store is lost (StoreState)   -         -       -        -       -         yes5
//
//   1  if a rank that has left is missing in the call; 3 s if this is not certain
//   2  unless this process got SIGTERM: then all ranks of the job end. Until the search is over, a
//      rank of another host must be missing in the call.
//   3  if the store answers in time: otherwise messages of hosts are late, too
//   4  except the rank that serves the store, if it is unknown and the store has ended
//   5  if the rank that serves the store is on another host
//   6  if that rank is missing in the call, and has not begun another step for 0.5 s, and this rank
//      raised no error in the same step. Numbers of calls alone do not count: they may be calls of
//      the script, in which that rank is slower.
//
// After a timeout of the backend, kAllHadTime is left out, and kWaits replaces kSearchIsOver: ranks
// that are silent or unknown may only be late.
std::optional<Failure> find_cause(
    const GroupState& state,
    Reason reason,
    int64_t since_ns,
    const std::optional<Wait>& wait = std::nullopt);

}  // namespace ddpx::health
