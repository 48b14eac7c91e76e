#include "settings.h"

#include <atomic>
#include <map>
#include <mutex>
#include <random>

namespace late {
namespace {

struct Settings {
  std::mutex mutex;
  std::chrono::microseconds max_hold{20'000};
  uint64_t seed = 0;
  std::mt19937_64 random;
  std::map<std::string, std::chrono::milliseconds> delays;
  std::atomic<bool> failures_hang{false};
};

Settings& settings() {
  static auto* const instance = new Settings;  // leaked: workers read it until the process ends
  return *instance;
}

}  // namespace

void set_hold(std::chrono::microseconds max_hold, uint64_t seed) {
  auto& s = settings();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.max_hold = max_hold;
  s.seed = seed;
  s.random.seed(seed);
}

std::chrono::microseconds next_hold() {
  auto& s = settings();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.seed == 0 || s.max_hold.count() == 0) {
    return s.max_hold;
  }
  return std::chrono::microseconds(s.random() % static_cast<uint64_t>(s.max_hold.count()));
}

void set_delay(const std::string& part, std::chrono::milliseconds delay) {
  auto& s = settings();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (delay.count() == 0) {
    s.delays.erase(part);
  } else {
    s.delays[part] = delay;
  }
}

std::chrono::milliseconds delay_of(const std::string& task_name) {
  auto& s = settings();
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::chrono::milliseconds delay{0};
  for (const auto& [part, time] : s.delays) {
    if (task_name.find(part) != std::string::npos) {
      delay += time;
    }
  }
  return delay;
}

void set_failures_hang(bool hang) {
  settings().failures_hang = hang;
}

bool failures_hang() {
  return settings().failures_hang;
}

}  // namespace late
