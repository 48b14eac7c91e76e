// Processes of this machine: identity, life and exit status.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "unique_fd.h"

namespace ddpx::os {

// Different for all processes.
struct ProcessId {
  std::string machine;  // one boot, and one namespace of process ids
  pid_t pid = 0;
  uint64_t start_time = 0;  // clock ticks since boot
};

// Throws an Error at the limit of open files: peers would take a wrong start time for another
// process, and a wrong machine for another host.
ProcessId this_process();

// Whether no process of this number runs. False if the kernel has no pidfds.
bool has_ended(pid_t pid);

// A process that may end at any time. Thread-safe.
class ProcessWatch {
 public:
  explicit ProcessWatch(ProcessId id);

  // Ready for reading when the process has ended. -1 if the kernel has no pidfds, or if this
  // process was at its limit of open files.
  int fd() const {
    return fd_.get();
  }

  // False if unknown.
  bool ended() const;

  // The status of a process that has ended, as wait() returns it; nullopt if unknown.
  std::optional<int> wait_status() const;

  // 'T' if it is stopped, else as in proc(5). 0 if it is gone or hidden, and at the limit of open
  // files.
  char state() const;

 private:
  ProcessId id_;
  UniqueFd fd_;
};

// "was killed by SIGKILL", "ended with exit code 3", or "died" if nothing is known.
std::string describe_ending(std::optional<int> wait_status);

}  // namespace ddpx::os
