// How late the device runs its work. Python sets it, and every queue reads it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace late {

using Clock = std::chrono::steady_clock;

// How long a task stays in its queue if nothing demands it: `max_hold` if `seed` is 0, else a
// pseudo-random part of `max_hold`. Applies to tasks that are pushed later.
void set_hold(std::chrono::microseconds max_hold, uint64_t seed);
std::chrono::microseconds next_hold();

// Tasks with `part` in their names take this much longer, also if demanded. 0 removes the delay.
void set_delay(const std::string& part, std::chrono::milliseconds delay);
std::chrono::milliseconds delay_of(const std::string& task_name);

// Whether a collective call that fails lasts until the backend is aborted, and then ends without an
// error, as NCCL's kernels do. Otherwise the next wait of the host throws gloo's error.
void set_failures_hang(bool hang);
bool failures_hang();

}  // namespace late
