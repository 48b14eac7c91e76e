// Python stacks of the ranks of a machine.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "peer.h"

namespace ddpx::health {

// Asks a rank of this machine for its stacks, and waits for the answer. nullopt if there is none in
// time, or if this rank cannot open the page of `peer`. `peer` may be null.
std::optional<std::string> request_stack(
    const std::shared_ptr<Peer>& peer, std::chrono::milliseconds timeout);

}  // namespace ddpx::health
