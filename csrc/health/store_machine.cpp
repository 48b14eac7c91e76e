#include "store_machine.h"

#include <chrono>
#include <thread>

namespace ddpx::health {
namespace {

constexpr auto kProbePeriod = std::chrono::milliseconds(500);
constexpr int kMostLooks = 2;

}  // namespace

void StoreMachine::meet(HostTable& table) const {
  for (int rank = 0; rank < size_; ++rank) {
    auto& entry = table.rank(rank);
    const auto who = Introduction::from_text(entry.introduction.read());
    if (table.is_member(rank) || !who || who->port == 0) {
      continue;
    }
    if (access_.ask(who->port) != PortState::kOpen) {
      return;  // a firewall, or another machine that has this address, too
    }
    entry.port = PortState::kOpen;
  }
}

void StoreMachine::mark_well(HostTable* table) const {
  for (int rank = 0; table != nullptr && rank < size_; ++rank) {
    auto& port = table->rank(rank).port;
    if (port != PortState::kUnknown) {
      port = PortState::kOpen;
    }
  }
}

// Asks until two answers are the same: a machine that goes down may refuse connections for a moment
// before.
bool StoreMachine::look(HostTable* table) const {
  auto state = access_.ask(access_.port);
  auto before = PortState::kUnknown;
  int looks = 0;
  do {
    before = state;
    std::this_thread::sleep_for(kProbePeriod);
    state = access_.ask(access_.port);
  } while (state != before && ++looks < kMostLooks);
  const bool is_sure = is_lost(state) && state == before;
  const bool ended = is_sure && state == PortState::kRefused;
  for (int rank = 0; table != nullptr && rank < size_; ++rank) {
    auto& entry = table->rank(rank);
    const auto who = Introduction::from_text(entry.introduction.read());
    if (entry.port != PortState::kUnknown && who) {
      const auto of_rank = ended ? access_.ask(who->port) : state;
      entry.port = is_sure && of_rank == state ? state : PortState::kOpen;
    }
  }
  return ended;
}

}  // namespace ddpx::health
