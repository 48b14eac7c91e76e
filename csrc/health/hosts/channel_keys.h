// The keys of the store that a channel between hosts uses.
#pragma once

#include <cstdint>
#include <string>

namespace ddpx::health {

// The start through the store: a list of the ranks with their hosts, and their number.
inline constexpr const char* kRanks = "ddpx/health/ranks";
inline constexpr const char* kCount = "ddpx/health/count";

// The introduction of a rank of this machine whose page may become the page of a host. The keys
// have numbers without gaps, so all ranks of a machine try them in the same order.
inline std::string candidate_key(const std::string& machine, int number) {
  return "ddpx/health/machine/" + machine + "/" + std::to_string(number);
}

// The hosts that have written a message.
inline constexpr const char* kHosts = "ddpx/health/hosts";

// The last message of a host.
inline std::string host_key(uint64_t token) {
  return "ddpx/health/host/" + std::to_string(token);
}

// Events have numbers without gaps. The first text for a number stays, so all hosts have the same
// order of events.
inline std::string event_key(uint32_t number) {
  return "ddpx/health/event/" + std::to_string(number);
}

// Wakes the keeper of a host after an event.
inline std::string wake_key_of(uint64_t token) {
  return "ddpx/health/wake/" + std::to_string(token);
}

}  // namespace ddpx::health
