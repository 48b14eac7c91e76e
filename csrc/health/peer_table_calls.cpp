// Whether ranks of one machine make the same collective calls.
#include <algorithm>
#include <cstddef>
#include <sstream>
#include <utility>

#include "calls.h"
#include "peer_table.h"

namespace ddpx::health {
namespace {

// Of the step that `ours` is about; none if it cannot be seen, or is not there any more. Models
// go around, wrappers do not.
std::optional<StepCalls> calls_of(const std::shared_ptr<Peer>& peer, const StepCalls& ours) {
  const auto* page = peer ? peer->page() : nullptr;
  const auto calls = page ? page->calls(ours.model, ours.step) : std::nullopt;
  return calls && calls->wrapper == ours.wrapper ? calls : std::nullopt;
}

}  // namespace

bool PeerTable::agrees(const StepCalls& ours) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(with_page_.begin(), with_page_.end(), [this, &ours](const auto& peer) {
    const auto theirs = calls_of(peer, ours);
    return !theirs || same_calls(*theirs, ours, same_sequence_);
  });
}

std::vector<std::pair<int, StepCalls>> PeerTable::step_calls(const StepCalls& ours) const {
  const auto all = this->all();
  std::vector<std::pair<int, StepCalls>> known;
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const auto calls = rank == rank_ ? std::make_optional(ours)
                                     : calls_of(all[static_cast<std::size_t>(rank)], ours);
    if (calls) {
      known.emplace_back(rank, *calls);
    }
  }
  return known;
}

Comparison PeerTable::compare(const StepCalls& ours, bool is_over) const {
  if (agrees(ours)) {
    return Comparison::kSame;
  }
  const auto all = this->all();
  const auto num_far =
      std::count_if(all.begin(), all.end(), [](const auto& peer) { return peer && !peer->page(); });
  const auto known = step_calls(ours);
  bool all_are_through = known.size() + static_cast<std::size_t>(num_far) == all.size();
  bool spoiled = false;
  for (auto [rank, calls] : known) {
    all_are_through = all_are_through && (is_over || calls.results != 0);
    spoiled = spoiled || calls.results == StepCalls::kSpoiled;
    calls.results = StepCalls::kNone;
    if (!same_calls(calls, ours, same_sequence_)) {
      return Comparison::kDifferent;
    }
  }
  if (spoiled) {
    return Comparison::kSame;
  }
  return all_are_through ? Comparison::kDifferent : Comparison::kUndecided;
}

std::string PeerTable::describe_calls(const StepCalls& ours) const {
  return describe_mismatch(step_calls(ours));
}

std::optional<std::string> PeerTable::uneven_sequences(const StepCalls& ours) const {
  bool even = true;
  std::ostringstream out;
  for (const auto& [rank, calls] : step_calls(ours)) {
    even = even && calls.sequence == ours.sequence;
    out << (out.tellp() > 0 ? ", " : "") << "rank " << rank << ": " << calls.sequence;
  }
  return even ? std::nullopt : std::make_optional(out.str());
}

}  // namespace ddpx::health
