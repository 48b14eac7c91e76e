// How much memory may still be taken, asked before taking it: the kernel would otherwise answer
// with its out-of-memory killer instead of an error.
#pragma once

#include <cstddef>
#include <string>

namespace ddpx::shm {

struct MemoryLimit {
  std::size_t num_bytes;
  std::string source;  // where the figure is from, for the error's text
};

// The least of what the system and the control groups of this process have left.
MemoryLimit available_memory();

// For tests: pretend that this much is left; 0 ends the pretence.
void pretend_available_memory(std::size_t num_bytes);

}  // namespace ddpx::shm
