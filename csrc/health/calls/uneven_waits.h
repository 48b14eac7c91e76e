// Finds ranks that wait for each other in different collective calls, while no rank is late.
#pragma once

#include <cstdint>
#include <optional>

#include "../verdict/peer_table.h"

namespace ddpx::health {

// The failure of ranks that wait for each other because they made different numbers of forwards:
// this rank synchronizes buffers in a forward, and another rank waits for a bucket of the same step
// after fewer forwards.
std::optional<Failure> find_uneven_forwards(const PeerTable& peers, const StatusPage& own);

// The failure of ranks that wait for each other because settings of a wrapper differ: all ranks
// have waited for some time after `since_ns`, and this rank and another one began their last common
// step with other settings.
std::optional<Failure> find_uneven_settings(
    const PeerTable& peers, const StatusPage& own, int64_t since_ns);

}  // namespace ddpx::health
