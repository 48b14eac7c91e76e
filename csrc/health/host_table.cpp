#include "host_table.h"

#include <chrono>
#include <thread>

namespace ddpx::health {
namespace {

// Another rank writes its failure within this time, unless it died while it wrote.
constexpr auto kTimeToWrite = std::chrono::milliseconds(100);

}  // namespace

void HostTable::introduce(const Introduction& who, Place place) {
  auto& entry = rank(who.rank);
  entry.introduction.write(who.to_text());
  entry.place = place;  // last: readers read the introduction of a rank that has a place
}

std::string HostTable::declare(int rank, const std::string& text, int64_t now_ns) {
  int32_t nobody = 0;
  if (declared_by_plus_1.compare_exchange_strong(nobody, rank + 1)) {
    failure.write(text);
    declared_ns = now_ns;
    return text;
  }
  const auto deadline = std::chrono::steady_clock::now() + kTimeToWrite;
  while (declared_ns == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return declared().value_or(text);
}

std::optional<std::string> HostTable::declared() const {
  return declared_ns != 0 ? std::make_optional(failure.read()) : std::nullopt;
}

}  // namespace ddpx::health
