// How late the device is: set from Python, read by every queue.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace late {

using Clock = std::chrono::steady_clock;

// How long a task stays in its queue while nothing demands it. With `seed` 0 every task is held for
// `max_hold`; otherwise for a pseudo-random part of it. Takes effect for tasks pushed from now on.
void set_hold(std::chrono::microseconds max_hold, uint64_t seed);
std::chrono::microseconds next_hold();

// Tasks whose name contains `part` take this much longer, demanded or not. 0 removes the delay.
void set_delay(const std::string& part, std::chrono::milliseconds delay);
std::chrono::milliseconds delay_of(const std::string& task_name);

// What the device says when it is asked whether its streams are being captured into a graph. It
// captures nothing.
void pretend_to_capture(bool capturing);
bool pretends_to_capture();

}  // namespace late
