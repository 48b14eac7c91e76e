// Counts the operations of each device, and the bytes that they read and write.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace late {

struct Count {
  int64_t operations = 0;
  int64_t bytes = 0;
};

// Counts since the last reset.
struct Counts {
  std::map<std::string, Count> native;      // by name: kernels and copies
  std::map<std::string, Count> fallback;    // operators that ran on the host
  std::map<std::string, Count> collective;  // the buffers of collectives
};

enum class Kind { kNative, kFallback, kCollective };

void count(Kind kind, int device, const std::string& name, int64_t bytes);
Counts counts_of(int device);

// How often the host blocked to wait for a device.
void count_synchronisation();
int64_t num_synchronisations();

void count_event();
int64_t num_events_made();

void reset_counts();

}  // namespace late
