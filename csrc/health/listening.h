// Whether a process listens at a port, which the kernel of its machine tells.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddpx::health {

enum class PortState : uint32_t {
  kUnknown,
  kOpen,     // a process listens there, which may be stopped or busy
  kRefused,  // none does
  kSilent,   // the machine does not answer
};

// Whether nothing that listened there can be reached any more.
inline bool is_lost(PortState state) {
  return state == PortState::kRefused || state == PortState::kSilent;
}

// Waits for `timeout` at most for each address of the host, and for the name to be resolved.
PortState state_of_port(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

// Lets this process listen at a port of its own, the same one in each call, until it ends: other
// machines then see whether it lives. Returns 0 if `host` is not an address of this machine that
// other machines can reach. A forked child does not listen.
uint16_t listen_if_local(const std::string& host);

}  // namespace ddpx::health
