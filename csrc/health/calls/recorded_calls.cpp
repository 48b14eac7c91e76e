#include "recorded_calls.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../count.h"
#include "../machine/record.h"

namespace ddpx::health {

std::optional<Failure> RecordedCalls::check(int64_t now_ns) {
  const auto num_calls = state_.page.view().num_calls.load();
  if (num_calls == 0 || num_calls != num_calls_) {
    num_calls_ = num_calls;
    since_ns_ = now_ns;
    return std::nullopt;
  }
  if (now_ns - since_ns_ < times::kNoCalls) {
    return std::nullopt;
  }
  if (published_ != num_calls) {
    published_ = num_calls;
    state_.log("calls_wanted", state_.group.name, state_.group.rank);
  }
  return any_written() ? compare() : std::nullopt;
}

bool RecordedCalls::any_written() {
  uint64_t number = state_.page.view().recorded.num_writes();
  const auto with_page = state_.peers.with_page();
  for (const auto& peer : *with_page) {
    number += peer->page()->recorded.num_writes();
  }
  return std::exchange(num_writes_, number) != number;
}

std::optional<Failure> RecordedCalls::compare() const {
  std::map<uint64_t, std::map<std::string, std::vector<int>>> ranks_by_call;  // by number, by text
  const auto peers = state_.peers.all();
  for (int rank = 0; rank < state_.group.world_size; ++rank) {
    const auto& peer = peers[static_cast<std::size_t>(rank)];
    const auto* page = rank == state_.group.rank ? &state_.page.view()
                       : peer                    ? peer->page()
                                                 : nullptr;
    const auto record = page != nullptr ? page->recorded.read() : std::string();
    std::string_view rest = record;
    uint64_t number = 0;
    std::string call;
    while (decode(rest, number, call)) {
      ranks_by_call[number][call].push_back(rank);
    }
  }
  for (const auto& [number, calls] : ranks_by_call) {
    if (calls.size() < 2) {
      continue;
    }
    Failure failure{FailureKind::kMismatch, {}, {}};
    for (const auto& [call, ranks] : calls) {
      failure.how += (failure.how.empty() ? "" : ", and ") + list_ranks(ranks) + " made " + call;
    }
    failure.how += ", as call " + std::to_string(number) + " of the group";
    return failure;
  }
  return std::nullopt;
}

}  // namespace ddpx::health
