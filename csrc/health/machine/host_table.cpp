#include "host_table.h"

#include <algorithm>
#include <cstring>

namespace ddpx::health {

uint64_t HostTable::decide_host(uint64_t token) {
  uint64_t standing = 0;
  return host.compare_exchange_strong(standing, token) ? token : standing;
}

void HostTable::introduce(const Introduction& who, uint64_t host_of_rank) {
  auto& entry = rank(who.rank);
  if (entry.host == 0) {
    entry.introduction.write(who.encode());
    entry.host = host_of_rank;  // last: a rank that has a host has an introduction
  }
}

std::string HostTable::declare(const std::string& record) {
  failure.declare([&](DeclaredFailure& draft) {
    draft.num_bytes = static_cast<uint32_t>(std::min(record.size(), draft.bytes.size()));
    std::memcpy(draft.bytes.data(), record.data(), draft.num_bytes);
  });
  return declared().value_or(record);
}

std::optional<std::string> HostTable::declared() const {
  const auto* first = failure.get();
  if (first == nullptr) {
    return std::nullopt;
  }
  const auto num_bytes = std::min<std::size_t>(first->num_bytes, first->bytes.size());
  return std::string(first->bytes.data(), num_bytes);
}

}  // namespace ddpx::health
