#include "recorded_calls.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../count.h"
#include "../machine/record.h"

namespace ddpx::health {
namespace {

// Descriptions of calls, by their numbers.
std::map<uint64_t, std::string> calls_of(const StatusPage& page) {
  std::map<uint64_t, std::string> calls;
  const auto record = page.recorded.read();
  std::string_view rest = record;
  uint64_t number = 0;
  std::string call;
  while (decode(rest, number, call)) {
    calls.emplace(number, call);
  }
  return calls;
}

}  // namespace

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
  for (const auto& peer : *state_.peers.with_page()) {
    number += peer->page()->recorded.num_writes();
  }
  return std::exchange(num_writes_, number) != number;
}

std::optional<Failure> RecordedCalls::compare() const {
  const auto own = calls_of(state_.page.view());
  if (own.empty()) {
    return std::nullopt;
  }
  std::map<int, std::map<uint64_t, std::string>> by_rank{{state_.group.rank, own}};
  for (const auto& peer : *state_.peers.with_page()) {
    if (auto theirs = calls_of(*peer->page()); !theirs.empty()) {
      by_rank.emplace(peer->rank(), std::move(theirs));
    }
  }
  for (const auto& [number, call] : own) {
    std::map<std::string, std::vector<int>> ranks_by_call;
    for (const auto& [rank, calls] : by_rank) {
      if (const auto found = calls.find(number); found != calls.end()) {
        ranks_by_call[found->second].push_back(rank);
      }
    }
    if (ranks_by_call.size() < 2) {
      continue;
    }
    Failure failure{FailureKind::kMismatch, {}, {}};
    for (const auto& [what, ranks] : ranks_by_call) {
      failure.how += (failure.how.empty() ? "" : ", and ") + list_ranks(ranks) + " made " + what;
    }
    failure.how += ", as call " + std::to_string(number) + " of the group";
    return failure;
  }
  return std::nullopt;
}

}  // namespace ddpx::health
