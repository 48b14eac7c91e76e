#include "host_table.h"

#include <chrono>
#include <thread>

namespace ddpx::health {
namespace {

// Another rank writes its failure within this time, unless it died while it wrote. Then one of the
// ranks that wait takes its place.
constexpr auto kTimeToWrite = std::chrono::milliseconds(100);

}  // namespace

uint64_t HostTable::decide_host(uint64_t token) {
  uint64_t standing = 0;
  return host.compare_exchange_strong(standing, token) ? token : standing;
}

void HostTable::introduce(const Introduction& who, uint64_t host_of_rank) {
  auto& entry = rank(who.rank);
  if (entry.host == 0) {
    entry.introduction.write(who.to_text());
    entry.host = host_of_rank;  // last: readers read the introduction of a rank that has a host
  }
}

std::string HostTable::declare(int rank, const std::string& text, int64_t now_ns) {
  int32_t writer = 0;
  while (!declared_by_plus_1.compare_exchange_strong(writer, rank + 1)) {
    const auto deadline = std::chrono::steady_clock::now() + kTimeToWrite;
    while (declared_ns == 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (const auto standing = declared()) {
      return *standing;
    }
  }
  failure.write(text);
  declared_ns = now_ns;
  return text;
}

std::optional<std::string> HostTable::declared() const {
  return declared_ns != 0 ? std::make_optional(failure.read()) : std::nullopt;
}

}  // namespace ddpx::health
