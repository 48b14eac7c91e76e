// The handler of SIGTERM, which wakes the watchdog.
#pragma once

#include <string>

namespace ddpx::health {

// From now on SIGTERM makes the event descriptor `wake_fd` readable, and does not end the process.
// Does nothing if the script has a handler of its own.
void take_sigterm(int wake_fd);

// Afterwards, no handler uses the descriptor any more.
void give_sigterm_back();

bool has_got_sigterm();

// Ends the process by the signal.
void die_of_sigterm();

// For a process that ends next. Another thread writes, because any write may block, as to a pipe
// that other ranks fill. Gives up after a second, and if no thread can start.
void write_to_stderr(const std::string& text);

}  // namespace ddpx::health
