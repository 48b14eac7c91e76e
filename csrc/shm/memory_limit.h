// How much memory a process may still allocate. The transport checks this before it allocates,
// since the kernel would otherwise start its out-of-memory killer instead of returning an error.
#pragma once

#include <cstddef>
#include <string>

namespace ddpx::shm {

struct MemoryLimit {
  std::size_t num_bytes;
  std::string source;  // where the limit comes from, for error texts
};

// The minimum over the memory left in the system and in the control groups of this process.
MemoryLimit available_memory();

// For tests: makes available_memory() return this size; 0 removes the override.
void override_available_memory(std::size_t num_bytes);

}  // namespace ddpx::shm
