#include "peer_table.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

#include "calls.h"

namespace ddpx::health {
namespace {

// Hosts that are asked write twice a second. They hear at once that they are asked.
constexpr int64_t kSilenceNs = 2'000'000'000;

constexpr int64_t kReadNs = 1'000'000'000;  // older reads are out of date

// How a rank has ended.
struct End {
  std::string what;
  FailureKind kind = FailureKind::kDead;
  bool may_be_meant = false;       // harms only ranks that wait for this rank
  bool because_of_others = false;  // another rank is to blame, and will be seen, too
};

std::optional<End> end_of(const Peer& peer) {
  const auto presence = peer.page() ? peer.page()->presence() : Presence::kThere;
  const bool ended = peer.watch() && peer.watch()->ended();
  if (presence == Presence::kFailing) {
    const bool blames = peer.page()->layout().culprit_plus_1.load() != 0;
    return blames && !ended ? std::nullopt
                            : std::make_optional(
                                  End{.what = "raised an exception that ended its script",
                                      .because_of_others = blames});
  }
  // Read at once, since the parent may take it away.
  const auto status = ended ? peer.watch()->wait_status() : std::nullopt;
  if (presence == Presence::kLeft && !(status && *status != 0)) {
    return End{
        .what = "has left (its script ended, or it destroyed its process group)",
        .kind = FailureKind::kLeft,
        .may_be_meant = true};
  }
  if (!ended) {
    return std::nullopt;
  }
  if (presence == Presence::kTerminated) {
    return End{.what = "ended after SIGTERM", .may_be_meant = true, .because_of_others = true};
  }
  // sys.exit(1) leaves with an exit code. Some scripts end with os._exit(0).
  const bool may_be_meant = presence == Presence::kLeft || status == 0;
  return End{.what = describe_ending(status), .may_be_meant = may_be_meant};
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
    // Not through with that construction, or busy with a wrapper that has no part in it.
    return theirs.model >= kNumConstructed || theirs.model + 1u < needed.step;
  }
  return true;  // busy with another model, or making one
}

// A bucket counts as launched when its communication hook is called; while that runs, or if it
// raised, peers wait.
std::optional<Progress> progress_of(const Peer& peer) {
  auto progress = peer.progress();
  const auto activity = peer.activity();
  if (progress && activity &&
      (activity->doing == Doing::kHook || activity->doing == Doing::kBrokenHook)) {
    progress->num_launched = std::min(progress->num_launched, activity->bucket);
  }
  return progress;
}

}  // namespace

PeerTable::PeerTable(int rank, int world_size, bool same_sequence)
    : rank_(rank),
      same_sequence_(same_sequence),
      peers_(static_cast<std::size_t>(world_size)),
      num_unknown_(peers_.size() - 1) {}

void PeerTable::meet(const std::shared_ptr<HostTable>& host, const ProcessId& self) {
  std::vector<int> unknown;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int rank = 0; num_unknown_ > 0 && rank < static_cast<int>(peers_.size()); ++rank) {
      if (rank != rank_ && !peers_[static_cast<std::size_t>(rank)]) {
        unknown.push_back(rank);
      }
    }
  }
  for (const int rank : unknown) {
    const auto& entry = host->rank(rank);
    const auto who =
        entry.host == 0 ? std::nullopt : Introduction::from_text(entry.introduction.read());
    if (who && who->rank == rank) {
      add(std::make_shared<Peer>(*who, self, host));
    }
  }
}

void PeerTable::add(std::shared_ptr<Peer> peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& place = peers_.at(static_cast<std::size_t>(peer->rank()));
  if (place) {
    return;  // another thread was quicker
  }
  --num_unknown_;
  if (peer->page() != nullptr) {
    with_page_.push_back(peer);
  }
  place = std::move(peer);
}

void PeerTable::name_ranks(RankNames names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  rank_names_ = std::move(names);
}

RankNames PeerTable::rank_names() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rank_names_;
}

std::vector<std::shared_ptr<Peer>> PeerTable::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_;
}

std::shared_ptr<Peer> PeerTable::peer(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_.at(static_cast<std::size_t>(rank));
}

bool PeerTable::any_remote() const {
  const auto all = this->all();
  return std::any_of(
      all.begin(), all.end(), [](const auto& peer) { return peer && !peer->local(); });
}

// ---- ranks that are gone -----------------------------------------------------------------------

LostRank PeerTable::lost_rank(int rank, std::string what) const {
  const auto known = peer(rank);
  if (!known) {
    return {rank, "unknown", 0, std::move(what), {}, {}};
  }
  const auto& who = known->introduction();
  return {rank, who.host, who.process.pid, std::move(what), {}, last_activity(*known)};
}

std::optional<Failure> PeerTable::find_dead(bool also_left) const {
  Failure dead;
  Failure left{FailureKind::kLeft, {}, {}};
  Failure because_of_others;
  for (const auto& peer : all()) {
    const auto end = peer ? end_of(*peer) : std::nullopt;
    if (!end || (!also_left && end->may_be_meant)) {
      continue;
    }
    auto found = lost_rank(peer->rank(), end->what);
    if (peer->page() != nullptr) {
      found.cause = peer->page()->layout().cause.read();
    }
    auto& failure = end->kind == FailureKind::kLeft ? left
                    : end->because_of_others        ? because_of_others
                                                    : dead;
    failure.lost.push_back(std::move(found));
  }
  for (auto* failure : {&dead, &left, &because_of_others}) {
    if (!failure->lost.empty()) {
      return *failure;
    }
  }
  return std::nullopt;
}

std::optional<Failure> PeerTable::find_silent(int64_t asked_ns, int64_t read_ns) const {
  Failure failure;
  const auto now = now_ns();
  for (const auto& peer : all()) {
    const auto heard = peer && !peer->local() ? peer->heard_ns() : 0;
    if (heard == 0 || now - std::max(heard, asked_ns) < kSilenceNs || now - read_ns > kReadNs) {
      continue;
    }
    failure.lost.push_back(lost_rank(
        peer->rank(),
        "has not been heard of for " + in_seconds(now - heard) +
            " s, and the communication failed: it, or its machine, died or was stopped"));
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

Failure PeerTable::store_lost(bool silent) const {
  return {
      FailureKind::kDead,
      {lost_rank(
          0,
          rank_ == 0
              ? "lost the store of the process group: its process ended, or it does not answer"
          : silent ? "or the launcher is lost or stopped: the store does not answer"
                   : "or the launcher died: the store is gone")},
      {}};
}

std::optional<Failure> PeerTable::find_unknown(bool store_answers) const {
  Failure failure;
  const auto peers = all();
  // Without the store, a rank knows nothing of the others. The lost store tells about rank 0.
  const bool only_first = !store_answers && rank_ != 0 && !peers.front();
  const char* what = only_first ? "or the launcher died: the store was lost before ranks had met"
                     : store_answers
                         ? "died before it wrapped its model, or never did"
                         : "is unknown here, since the store was lost before ranks had met";
  for (int rank = 0; rank < (only_first ? 1 : static_cast<int>(peers.size())); ++rank) {
    if (rank != rank_ && !peers[static_cast<std::size_t>(rank)]) {
      failure.lost.push_back(lost_rank(rank, what));
    }
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

// ---- late --------------------------------------------------------------------------------------

std::vector<int> PeerTable::missing(const Activity& activity, const Progress& progress) const {
  auto needed = progress;
  const bool in_hook = activity.doing == Doing::kHook;
  if (activity.doing == Doing::kWaiting || in_hook) {
    needed.num_launched = static_cast<uint16_t>(activity.bucket + 1);  // then it does its part
  }
  std::vector<int> missing;
  const auto all = this->all();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (rank == rank_) {
      continue;
    }
    const auto& peer = all[static_cast<std::size_t>(rank)];
    // Who is in a hook waits for those that have not called theirs.
    const auto theirs = !peer ? std::nullopt : in_hook ? peer->progress() : progress_of(*peer);
    if (!theirs || peer->stopped() || is_behind(*theirs, needed)) {
      missing.push_back(rank);
    }
  }
  return missing;
}

std::string PeerTable::describe_missing(int rank) const {
  const auto late = peer(rank);
  const auto prefix = rank_names().prefix(rank);
  if (!late) {
    return prefix + "which has not wrapped its model yet";
  }
  const auto& who = late->introduction();
  const auto last = last_activity(*late);
  const auto* page = late->page();
  return prefix + "host " + who.host + ", pid " + std::to_string(who.process.pid) + ", " +
         (last.empty() ? "its activity is unknown" : "last seen in " + last) +
         (page && page->presence() == Presence::kLeft ? ", has left" : "");
}

std::string PeerTable::last_activity(const Peer& peer) const {
  const auto activity = peer.activity();
  auto text = activity ? names_.describe(*activity) : std::string();
  const auto add = [&text](const std::string& more) {
    text += (text.empty() || more.empty() ? "" : ", ") + more;
  };
  add(peer.page() ? peer.page()->layout().detail.read() : "");
  add(peer.stopped() ? "stopped by a signal (SIGSTOP)" : "");
  return text;
}

// ---- comparison of calls -----------------------------------------------------------------------

// In every step: copies nothing.
bool PeerTable::agrees(const StepCalls& ours) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(with_page_.begin(), with_page_.end(), [this, &ours](const auto& peer) {
    const auto theirs = peer->page()->calls(ours);
    return !theirs || same_calls(*theirs, ours, same_sequence_);
  });
}

std::vector<std::pair<int, StepCalls>> PeerTable::step_calls(const StepCalls& ours) const {
  std::vector<std::pair<int, StepCalls>> known{{rank_, ours}};
  for (const auto& peer : all()) {
    const auto theirs = peer && peer->page() ? peer->page()->calls(ours) : std::nullopt;
    if (theirs) {
      known.emplace_back(peer->rank(), *theirs);
    }
  }
  std::sort(known.begin(), known.end(), [](auto& a, auto& b) { return a.first < b.first; });
  return known;
}

Comparison PeerTable::compare(const StepCalls& ours, bool is_over) const {
  if (agrees(ours)) {
    return Comparison::kSame;
  }
  const auto peers = all();
  const auto num_without_page = static_cast<std::size_t>(std::count_if(
      peers.begin(), peers.end(), [](const auto& peer) { return peer && !peer->page(); }));
  const auto known = step_calls(ours);
  bool all_are_through = known.size() + num_without_page == peers.size();
  bool any_invalid = false;
  for (auto [rank, calls] : known) {
    all_are_through = all_are_through && (is_over || calls.results != 0);
    any_invalid = any_invalid || calls.results == StepCalls::kSpoiled;
    calls.results = StepCalls::kNone;
    if (!same_calls(calls, ours, same_sequence_)) {
      return Comparison::kDifferent;
    }
  }
  return any_invalid       ? Comparison::kSame
         : all_are_through ? Comparison::kDifferent
                           : Comparison::kUndecided;
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
