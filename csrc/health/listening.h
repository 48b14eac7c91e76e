// Whether anybody listens at an address.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddpx::health {

// True if each of the host's addresses refuses: the process that listened there has ended. One that
// is stopped or busy does not refuse, nor does a machine that is lost. Waits for `timeout` at most,
// and for the name to be resolved.
bool refuses_connections(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

}  // namespace ddpx::health
