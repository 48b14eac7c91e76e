#include "host_table.h"

namespace ddpx::health {
namespace {

const HostTable::Draft* declared_draft(const HostTable& table) {
  const auto number_plus_1 = table.declared_draft_plus_1.load();
  return number_plus_1 == 0 ? nullptr : &table.drafts[number_plus_1 - 1];
}

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

std::string HostTable::declare(const std::string& text, int64_t now_ns) {
  for (std::size_t number = 0; number < drafts.size(); ++number) {
    auto& draft = drafts[number];
    if (!draft.taken.exchange(true)) {
      draft.failure.write(text);
      draft.written_ns = now_ns;
      uint32_t none = 0;
      declared_draft_plus_1.compare_exchange_strong(none, static_cast<uint32_t>(number) + 1);
      return declared().value_or(text);
    }
    poll_until(health::now_ns() + times::kWriteFailure, times::kFlagPoll, [this] {
      return declared_draft_plus_1 != 0;
    });
    if (auto standing = declared()) {
      return *standing;
    }
  }
  return text;  // as many ranks as there are drafts are stopped, or have died, while they wrote
}

std::optional<std::string> HostTable::declared() const {
  const auto* draft = declared_draft(*this);
  return draft == nullptr ? std::nullopt : std::make_optional(draft->failure.read());
}

int64_t HostTable::declared_ns() const {
  const auto* draft = declared_draft(*this);
  return draft == nullptr ? 0 : draft->written_ns.load();
}

}  // namespace ddpx::health
