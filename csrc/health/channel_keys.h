// The keys of the store that a channel between hosts uses.
#pragma once

#include <cstdint>
#include <string>

namespace ddpx::health {

inline constexpr const char* kHosts = "ddpx/health/hosts";  // tokens of hosts
inline constexpr const char* kCount =
    "ddpx/health/count";  // of ranks that have introduced themselves

// Introductions of all ranks that claim this machine.
inline std::string machine_key(const std::string& machine) {
  return "ddpx/health/machine/" + machine;
}

// The last message of a host.
inline std::string host_key(uint64_t token) {
  return "ddpx/health/host/" + std::to_string(token);
}

// Events have numbers without gaps, and the first text for a number stands. So all hosts see the
// same order.
inline std::string event_key(uint32_t number) {
  return "ddpx/health/event/" + std::to_string(number);
}

inline std::string wake_key_of(uint64_t token) {
  return "ddpx/health/wake/" + std::to_string(token);
}

}  // namespace ddpx::health
