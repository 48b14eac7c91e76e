#include "peer_table.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

namespace ddpx::health {
namespace {

// Hosts that are asked write twice a second. They hear at once that they are asked.
constexpr int64_t kSilenceNs = 2'000'000'000;

constexpr int64_t kReadNs = 1'000'000'000;  // older reads are out of date

bool blames_another(const Peer& peer) {
  const auto* page = peer.page();
  return page && page->presence() == Presence::kFailing &&
         page->layout().culprit_plus_1.load() != 0;
}

// How a rank has ended. `may_be_meant`: the end harms only ranks that wait for it.
struct End {
  std::string what;
  bool may_be_meant = false;
  bool left = false;
  bool raised = false;
  bool because_of_others = false;
};

std::optional<End> end_of(const Peer& peer) {
  const auto presence = peer.page() ? peer.page()->presence() : Presence::kThere;
  const bool ended = peer.watch() && peer.watch()->ended();
  if (presence == Presence::kFailing) {
    const bool blames = blames_another(peer);
    return blames && !ended ? std::nullopt  // the rank that it blames will be seen, too
                            : std::make_optional(
                                  End{.what = "raised an exception that ended its script",
                                      .raised = true,
                                      .because_of_others = blames});
  }
  // Read at once, since the parent may take it away.
  const auto status = ended ? peer.watch()->wait_status() : std::nullopt;
  if (presence == Presence::kLeft && !(status && *status != 0)) {
    return End{
        .what = "has left (its script ended, or it destroyed its process group)",
        .may_be_meant = true,
        .left = true};
  }
  if (presence == Presence::kTerminated && ended) {
    return End{
        .what = "was told to end, by SIGTERM", .may_be_meant = true, .because_of_others = true};
  }
  // sys.exit(1) leaves with an exit code. Some scripts end with os._exit(0).
  const bool may_be_meant = presence == Presence::kLeft || status == 0;
  return ended ? std::make_optional(
                     End{.what = describe_ending(status), .may_be_meant = may_be_meant})
               : std::nullopt;
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
    const auto who = entry.place == HostTable::Place::kUnknown
                         ? std::nullopt
                         : Introduction::from_text(entry.introduction.read());
    if (who && who->rank == rank) {
      add(std::make_shared<Peer>(*who, self, host));
    }
  }
}

void PeerTable::meet(
    const std::shared_ptr<HostTable>& host,
    const ProcessId& self,
    const std::vector<Introduction>& ranks) {
  PeerTable met(rank_, static_cast<int>(peers_.size()), same_sequence_);
  for (const auto& rank : ranks) {
    if (rank.rank >= 0 && rank.rank < static_cast<int>(peers_.size()) && rank.rank != rank_) {
      met.add(std::make_shared<Peer>(rank, self, host));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  peers_.swap(met.peers_);
  with_page_.swap(met.with_page_);
  num_unknown_ = met.num_unknown_;
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

// ---- gone --------------------------------------------------------------------------------------

LostRank PeerTable::lost_rank(const Peer& peer, std::string what) const {
  const auto& who = peer.introduction();
  const auto last = peer.activity();
  return LostRank{
      peer.rank(),
      who.host,
      who.process.pid,
      std::move(what),
      {},
      last ? names_.describe(*last) : std::string()};
}

std::optional<Failure> PeerTable::find_dead(bool also_left) const {
  Failure left{FailureKind::kLeft, {}, {}};
  Failure first;
  Failure because_of_others;
  for (const auto& peer : all()) {
    const auto end = peer ? end_of(*peer) : std::nullopt;
    if (!end || (!also_left && end->may_be_meant)) {
      continue;
    }
    auto found = lost_rank(*peer, end->what);
    if (end->raised) {
      found.cause = peer->page()->layout().cause.read();
    }
    auto& failure = end->left ? left : end->because_of_others ? because_of_others : first;
    failure.lost.push_back(std::move(found));
  }
  for (auto* failure : {&first, &left, &because_of_others}) {
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
        *peer,
        "has not been heard of for " + in_seconds(now - heard) +
            " s, and the communication failed: it, or its machine, died or was stopped"));
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

Failure PeerTable::store_lost(bool silent) const {
  const auto first = peer(0);
  const std::string what =
      rank_ == 0 ? "lost the store of the process group: its process ended, or it does not answer"
      : silent   ? "or the launcher is lost or stopped: the store does not answer"
                 : "or the launcher died: the store is gone";
  return {
      FailureKind::kDead,
      {first ? lost_rank(*first, what) : LostRank{0, "unknown", 0, what, {}, {}}},
      {}};
}

std::optional<Failure> PeerTable::find_unknown(bool store_answers) const {
  Failure failure;
  const auto all = this->all();
  // Of the others a rank without a store can know nothing; its silence tells of rank 0.
  const bool only_first = !store_answers && rank_ != 0 && !all.front();
  for (int rank = 0; rank < (only_first ? 1 : static_cast<int>(all.size())); ++rank) {
    if (rank != rank_ && !all[static_cast<std::size_t>(rank)]) {
      failure.lost.push_back(
          {rank,
           "unknown",
           0,
           only_first      ? "or the launcher died: the store was lost before ranks had met"
           : store_answers ? "died before it wrapped its model, or never did"
                           : "is unknown here, since the store was lost before ranks had met",
           {},
           {}});
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
  return prefix + "host " + who.host + ", pid " + std::to_string(who.process.pid) + ", " +
         whereabouts(*late);
}

std::string PeerTable::whereabouts(const Peer& peer) const {
  const std::string stopped = peer.stopped() ? "stopped by a signal (SIGSTOP), " : "";
  const auto activity = peer.activity();
  if (!activity) {
    return stopped + "its activity is unknown";
  }
  auto text = stopped + "last seen in " + names_.describe(*activity);
  if (const auto* page = peer.page()) {
    const auto detail = page->layout().detail.read();
    text += (detail.empty() ? "" : ", ") + detail;
    text += page->presence() == Presence::kLeft ? ", has left" : "";
  }
  return text;
}

}  // namespace ddpx::health
