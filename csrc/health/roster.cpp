#include "roster.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

namespace ddpx::health {
namespace {

constexpr const char* kHasLeft = "has left (its script ended, or it destroyed its process group)";

// They tell something twice a second.
constexpr int64_t kSilenceNs = 2'000'000'000;

bool blames_another(const Peer& peer) {
  const auto* page = peer.page();
  return page && page->presence() == Presence::kFailing &&
         page->layout().culprit_plus_1.load() != 0;
}

// Of the step that `ours` is about; none if it cannot be seen, or is not there any more.
std::optional<Trail> trail_of(const std::shared_ptr<Peer>& peer, const Trail& ours) {
  return peer && peer->page() ? peer->page()->trail(ours.model, ours.step) : std::nullopt;
}

bool same_calls(const Trail& a, const Trail& b) {
  const bool both_launched_all = a.num_launched == b.num_launched;
  const bool both_are_back = a.results != 0 && b.results != 0;
  return a.sequence == b.sequence && (!both_launched_all || a.digest == b.digest) &&
         (!both_are_back || a.results == b.results);
}

// In the order in which all ranks make their collective calls.
auto place(const Progress& progress) {
  return std::tuple(progress.step, progress.stage, progress.num_launched);
}

bool is_behind(const Progress& theirs, const Progress& needed) {
  if (theirs.model == needed.model) {
    return place(theirs) < place(needed);
  }
  if (needed.model == kNoModel) {
    return theirs.model + 1u < needed.step;  // not through with that construction
  }
  return true;  // busy with another model, or making one
}

// A bucket counts as launched when its communication hook is called; while that runs, peers wait.
std::optional<Progress> progress_of(const Peer& peer) {
  auto progress = peer.progress();
  const auto activity = peer.activity();
  if (progress && activity && activity->doing == Doing::kHook) {
    progress->num_launched = std::min(progress->num_launched, activity->bucket);
  }
  return progress;
}

}  // namespace

Roster::Roster(int rank, int world_size)
    : rank_(rank), peers_(static_cast<std::size_t>(world_size)) {}

bool Roster::meet(int rank, const Introduction& introduction, const ProcessId& self) {
  auto peer = Peer::meet(rank, introduction, self);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer) {
    peers_[static_cast<std::size_t>(rank)] = std::move(peer);
    return true;
  }
  return false;
}

std::vector<std::shared_ptr<Peer>> Roster::peers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_;
}

std::shared_ptr<Peer> Roster::peer(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_.at(static_cast<std::size_t>(rank));
}

std::vector<int> Roster::far_ranks() const {
  std::vector<int> far;
  for (const auto& peer : peers()) {
    if (peer && !peer->local()) {
      far.push_back(peer->rank());
    }
  }
  return far;
}

// ---- gone --------------------------------------------------------------------------------------

std::optional<Casualty> Roster::casualty(const Peer& peer, bool also_left) const {
  const auto& who = peer.introduction();
  Casualty found{peer.rank(), who.host, who.process.pid, {}, {}, {}};
  if (const auto activity = peer.activity()) {
    found.last_seen = names_.describe(*activity);
  }
  const auto presence = peer.page() ? peer.page()->presence() : Presence::kThere;
  const bool ended = peer.watch() && peer.watch()->ended();
  if (presence == Presence::kFailing) {
    if (blames_another(peer) && !ended) {
      return std::nullopt;  // that one will be seen, too
    }
    found.what = "raised an exception that ended its script";
    found.cause = peer.page()->layout().cause.read();
    return found;
  }
  if (presence == Presence::kAtOdds) {
    return std::nullopt;  // its script may end; why, find_mismatch() tells
  }
  if (presence == Presence::kLeft) {
    found.what = kHasLeft;
    return also_left ? std::make_optional(found) : std::nullopt;
  }
  if (!ended) {
    return std::nullopt;
  }
  found.what = peer.watch()->ending();
  if (found.what == "ended with exit code 0" && !also_left) {
    return std::nullopt;  // os._exit(0), as some scripts end
  }
  return found;
}

std::optional<Failure> Roster::find_dead(bool also_left) const {
  Failure first;
  Failure because_of_others;
  for (const auto& peer : peers()) {
    if (auto found = peer ? casualty(*peer, also_left) : std::nullopt) {
      (blames_another(*peer) ? because_of_others : first).casualties.push_back(std::move(*found));
    }
  }
  auto& failure = first.casualties.empty() ? because_of_others : first;
  if (failure.casualties.empty()) {
    return std::nullopt;
  }
  const auto left = [](const Casualty& casualty) { return casualty.what == kHasLeft; };
  if (std::all_of(failure.casualties.begin(), failure.casualties.end(), left)) {
    failure.kind = FailureKind::kLeft;
  } else {
    std::erase_if(failure.casualties, left);
  }
  return failure;
}

std::optional<Failure> Roster::find_mismatch(int64_t before_ns) const {
  std::optional<Failure> first;
  for (const auto& peer : peers()) {
    if (!peer || !peer->page() || peer->page()->presence() != Presence::kAtOdds) {
      continue;
    }
    const auto& layout = peer->page()->layout();
    if (layout.at_odds_since_ns < before_ns) {
      before_ns = layout.at_odds_since_ns;
      first = Failure{FailureKind::kMismatch, {}, layout.cause.read()};
    }
  }
  return first;
}

std::optional<Failure> Roster::find_declared() const {
  for (const auto& peer : peers()) {
    if (peer && peer->page()) {
      if (auto failure = Failure::from_text(peer->page()->layout().failure.read())) {
        return failure;
      }
    }
  }
  return std::nullopt;
}

std::optional<Failure> Roster::find_silent() const {
  Failure failure;
  for (const auto& peer : peers()) {
    const auto since = peer && !peer->local() ? peer->silent_since_ns() : 0;
    if (since == 0 || now_ns() - since < kSilenceNs) {
      continue;
    }
    const auto& who = peer->introduction();
    const auto last = peer->activity();
    failure.casualties.push_back(
        {peer->rank(),
         who.host,
         who.process.pid,
         "has not been heard of for " + in_seconds(now_ns() - since) +
             " s, and its connections broke: it died, or its machine did",
         {},
         last ? names_.describe(*last) : std::string()});
  }
  return failure.casualties.empty() ? std::nullopt : std::make_optional(failure);
}

std::optional<Failure> Roster::find_unknown() const {
  Failure failure;
  const auto all = peers();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (rank != rank_ && !all[static_cast<std::size_t>(rank)]) {
      failure.casualties.push_back(
          {rank, "unknown", 0, "died before it wrapped its model, or never did", {}, {}});
    }
  }
  return failure.casualties.empty() ? std::nullopt : std::make_optional(failure);
}

// ---- late --------------------------------------------------------------------------------------

std::vector<int> Roster::missing(const Activity& activity, const Progress& progress) const {
  auto needed = progress;
  if (activity.doing == Doing::kWaiting) {
    needed.num_launched = static_cast<uint16_t>(activity.bucket + 1);  // then it does its part
  }
  std::vector<int> missing;
  const auto all = peers();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (rank == rank_) {
      continue;
    }
    const auto& peer = all[static_cast<std::size_t>(rank)];
    const auto theirs = peer ? progress_of(*peer) : std::nullopt;
    const bool stopped = peer && peer->watch() && peer->watch()->state() == 'T';
    if (!theirs || stopped || is_behind(*theirs, needed)) {
      missing.push_back(rank);
    }
  }
  return missing;
}

std::string Roster::describe_missing(int rank) const {
  const auto late = peer(rank);
  if (!late) {
    return "which has not wrapped its model yet";
  }
  const auto& who = late->introduction();
  return "host " + who.host + ", pid " + std::to_string(who.process.pid) + ", " +
         whereabouts(*late);
}

std::string Roster::whereabouts(const Peer& peer) const {
  std::ostringstream out;
  if (peer.watch() && peer.watch()->state() == 'T') {
    out << "stopped by a signal (SIGSTOP), ";
  }
  const auto activity = peer.activity();
  if (!activity) {
    out << "of which nothing is known";
    return out.str();
  }
  out << "last seen in " << names_.describe(*activity) << ", for "
      << in_seconds(now_ns() - activity->since_ns) << " s";
  if (const auto* page = peer.page()) {
    const auto detail = page->layout().detail.read();
    out << (detail.empty() ? "" : ", ") << detail
        << (page->presence() == Presence::kLeft ? ", has left" : "");
  } else if (const auto since = peer.silent_since_ns()) {
    out << ", heard of " << in_seconds(now_ns() - since) << " s ago";
  }
  return out.str();
}

// ---- calls in another order --------------------------------------------------------------------

bool Roster::agrees(const Trail& ours) const {
  const std::lock_guard<std::mutex> lock(mutex_);  // in every step: nothing is copied
  return std::all_of(peers_.begin(), peers_.end(), [&ours](const auto& peer) {
    const auto theirs = trail_of(peer, ours);
    return !theirs || same_calls(*theirs, ours);
  });
}

std::optional<std::string> Roster::mismatch(const Trail& ours) const {
  if (agrees(ours)) {
    return std::nullopt;
  }
  auto all = peers();
  std::ostringstream out;
  out << "ranks made different collective calls in step " << ours.step << ", or before it:";
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const auto trail = rank == rank_ ? std::make_optional(ours)
                                     : trail_of(all[static_cast<std::size_t>(rank)], ours);
    if (trail) {
      out << "\n  rank " << rank << ": " << trail->num_launched
          << " buckets, digest of their sizes " << std::hex << (trail->digest >> 32);
      if (trail->results != 0) {
        out << ", of what they came back with " << (trail->results >> 32);
      }
      out << std::dec;
      if (trail->sequence != 0) {
        out << ", the first as call number " << trail->sequence << " of the group";
      }
    }
  }
  return out.str();
}

}  // namespace ddpx::health
