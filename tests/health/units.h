// Durations in nanoseconds.
#pragma once

#include <cstdint>

namespace ddpx::health {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kMillisecond = 1'000'000;

}  // namespace ddpx::health
