// Whether anybody listens at an address.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddpx::health {

// True if an address of the host refuses and none connects: the process that listened there has
// ended. One that is stopped or busy does not refuse, nor does a machine that is lost. Waits for
// `timeout` at most for each address, and for the name to be resolved.
bool refuses_connections(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

}  // namespace ddpx::health
