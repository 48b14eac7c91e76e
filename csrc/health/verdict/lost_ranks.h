// Finds the lost ranks, and the ranks to blame among them.
#pragma once

#include <cstdint>
#include <optional>

#include "failure.h"
#include "peer_table.h"

namespace ddpx::health {

// The ranks that count as lost after they have left.
enum class Left { kNone, kOfThisHost, kAll };

// The ranks that are dead, or whose scripts end with an error. A rank that fails because of another
// rank is left out, unless all dead or failing ranks do so.
std::optional<Failure> find_dead(const PeerTable& peers, Left left);

// The ranks of hosts that have written no message for kHostSilence, although this rank has asked
// for messages since `asked_ns`. `read_ns`: when this host last read the messages.
std::optional<Failure> find_silent(const PeerTable& peers, int64_t asked_ns, int64_t read_ns);

// The ranks that have not introduced themselves, since they have no wrapper of this group.
// `store_answers`: this rank could ask the store for these ranks.
std::optional<Failure> find_unknown(const PeerTable& peers, bool store_answers);

// The failure of the rank that serves the store, because the store is lost. `silent`: the store
// does not answer. Its host may be lost, or only its process may be stopped.
Failure store_lost(const PeerTable& peers, bool silent);

}  // namespace ddpx::health
