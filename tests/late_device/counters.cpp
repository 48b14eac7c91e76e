#include "counters.h"

#include <mutex>

#include "streams.h"

namespace late {
namespace {

struct Counters {
  std::mutex mutex;
  std::array<Counts, kNumDevices> devices;
  int64_t num_synchronisations = 0;
  int64_t num_events_made = 0;
};

Counters& counters() {
  static auto* const instance = new Counters;
  return *instance;
}

}  // namespace

void count(Kind kind, int device, const std::string& name, int64_t bytes) {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  auto& counts = c.devices.at(static_cast<std::size_t>(device));
  auto& by_name = kind == Kind::kNative     ? counts.native
                  : kind == Kind::kFallback ? counts.fallback
                                            : counts.collective;
  auto& entry = by_name[name];
  ++entry.operations;
  entry.bytes += bytes;
}

Counts counts_of(int device) {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  return c.devices.at(static_cast<std::size_t>(device));
}

void count_synchronisation() {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  ++c.num_synchronisations;
}

int64_t num_synchronisations() {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  return c.num_synchronisations;
}

void count_event() {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  ++c.num_events_made;
}

int64_t num_events_made() {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  return c.num_events_made;
}

void reset_counts() {
  auto& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.devices = {};
  c.num_synchronisations = 0;
  c.num_events_made = 0;
}

}  // namespace late
