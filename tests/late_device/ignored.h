// Waits that the device leaves out on purpose, to prove that tests detect this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace late {

enum class Wait {
  kStream,  // a stream waits for an event
  kHost,    // the host waits for an event, a stream or a device
  kRecord,  // memory is recorded on a stream
};

// Waits of this kind are ignored if the call stack has a function for each of these parts of
// demangled names, and no function for a part that begins with "!". Only functions that a shared
// library exports have names. Returns the rule's number.
int64_t ignore(Wait kind, std::vector<std::string> callers);
void stop_ignoring();

// How often the rule applied: a proof with 0 proves nothing.
int64_t num_ignored(int64_t rule);

// Must be called at each wait.
bool ignored(Wait kind);

}  // namespace late
