// The memory and the CPU time that the system and its control groups leave to this process. In all
// functions, `root` precedes the paths of files, for tests.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace ddpx::os {

struct MemoryLimit {
  std::size_t num_bytes;
  std::string source;  // where the limit comes from, for error texts
};

// The memory that the process may still allocate: the minimum over the system and its control
// groups. Callers check this before they allocate, since the kernel would otherwise start its
// out-of-memory killer instead of returning an error.
MemoryLimit available_memory(const std::string& root = "");

// For tests: makes available_memory() return this size; 0 removes the override.
void override_available_memory(std::size_t num_bytes);

struct CpuLimits {
  cpu_set_t cores;       // the affinity mask; all cores if the system has more than the mask holds
  uint64_t quota_group;  // inode of the control group with the smallest CPU quota; 0: no quota
  double quota_cores;    // that quota (cpu.max), in cores
};

// The limits of the calling thread.
CpuLimits cpu_limits(const std::string& root = "");

}  // namespace ddpx::os
