// The handler of SIGTERM, which wakes the watchdog.
#pragma once

#include <string>

namespace ddpx::health {

// From now on, SIGTERM makes the event descriptor `wake_fd` readable, and does not end the process.
// Has no effect if the script has its own handler.
void take_sigterm(int wake_fd);

// Restores the default handler. Afterwards, no handler uses the descriptor.
void give_sigterm_back();

bool has_got_sigterm();

// Ends the process by the signal.
void die_of_sigterm();

// For a process that is about to end. Another thread writes, because a write may block, for example
// if a pipe is full. Gives up after a second, or if no thread can start.
void write_to_stderr(const std::string& text);

}  // namespace ddpx::health
