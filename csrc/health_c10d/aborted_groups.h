// Keeps aborted NCCL groups, whose threads torch needs until the process ends.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddpx {

// Aborts a group. A backend that cannot abort is left as it is. The abort may take long. Keeps an
// NCCL group forever: its destructor waits for torch's watchdog thread, which sleeps for a minute
// after an NCCL error. The process then ends with its exit code, but without the destructors of
// static objects. Thread-safe.
void abort_and_keep(const c10::intrusive_ptr<c10d::ProcessGroup>& group) noexcept;

// At the end of the script, without the GIL. After an error, torch's watchdog threads compute the
// tracebacks of calls for some seconds, for which they need the interpreter. Waits until they are
// idle, at most for 20 s. Returns at once if no group was kept.
void await_watchdogs_of_aborted();

}  // namespace ddpx
