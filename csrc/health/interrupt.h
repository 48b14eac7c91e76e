// Lets the interpreter raise a failure at once.
#pragma once

#include <atomic>
#include <cstdint>

namespace ddpx::health {

// Makes the main thread raise the failure of the group whose state has this token. Does not wait,
// and needs no lock of the interpreter.
using Interrupt = void (*)(uint64_t token);

// Null without an interpreter.
inline std::atomic<Interrupt> interrupt{nullptr};

}  // namespace ddpx::health
