// Whether ranks of one machine make the same collective calls.
#include <algorithm>
#include <cstddef>
#include <sstream>
#include <utility>

#include "calls.h"
#include "roster.h"

namespace ddpx::health {
namespace {

// Of the step that `ours` is about; none if it cannot be seen, or is not there any more. Models
// go around, wrappers do not.
std::optional<Trail> trail_of(const std::shared_ptr<Peer>& peer, const Trail& ours) {
  const auto* page = peer ? peer->page() : nullptr;
  const auto trail = page ? page->trail(ours.model, ours.step) : std::nullopt;
  return trail && trail->wrapper == ours.wrapper ? trail : std::nullopt;
}

}  // namespace

bool Roster::agrees(const Trail& ours) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(with_page_.begin(), with_page_.end(), [this, &ours](const auto& peer) {
    const auto theirs = trail_of(peer, ours);
    return !theirs || same_calls(*theirs, ours, same_sequence_);
  });
}

std::vector<std::pair<int, Trail>> Roster::trails(const Trail& ours) const {
  const auto all = peers();
  std::vector<std::pair<int, Trail>> known;
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const auto trail = rank == rank_ ? std::make_optional(ours)
                                     : trail_of(all[static_cast<std::size_t>(rank)], ours);
    if (trail) {
      known.emplace_back(rank, *trail);
    }
  }
  return known;
}

Comparison Roster::compare(const Trail& ours, bool is_over) const {
  if (agrees(ours)) {
    return Comparison::kSame;
  }
  const auto all = peers();
  const auto num_far =
      std::count_if(all.begin(), all.end(), [](const auto& peer) { return peer && !peer->page(); });
  const auto known = trails(ours);
  bool all_are_through = known.size() + static_cast<std::size_t>(num_far) == all.size();
  bool spoiled = false;
  for (auto [rank, trail] : known) {
    all_are_through = all_are_through && (is_over || trail.results != 0);
    spoiled = spoiled || trail.results == Trail::kSpoiled;
    trail.results = Trail::kNone;
    if (!same_calls(trail, ours, same_sequence_)) {
      return Comparison::kDifferent;
    }
  }
  if (spoiled) {
    return Comparison::kSame;
  }
  return all_are_through ? Comparison::kDifferent : Comparison::kUndecided;
}

std::string Roster::describe_calls(const Trail& ours) const {
  return describe_mismatch(trails(ours));
}

std::optional<std::string> Roster::uneven_sequences(const Trail& ours) const {
  bool even = true;
  std::ostringstream out;
  for (const auto& [rank, trail] : trails(ours)) {
    even = even && trail.sequence == ours.sequence;
    out << (out.tellp() > 0 ? ", " : "") << "rank " << rank << ": " << trail.sequence;
  }
  return even ? std::nullopt : std::make_optional(out.str());
}

}  // namespace ddpx::health
