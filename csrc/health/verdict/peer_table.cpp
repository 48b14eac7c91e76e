#include "peer_table.h"

#include <algorithm>
#include <array>
#include <utility>

namespace ddpx::health {
namespace {

// The cause of the end of a rank. The report has only ranks of the first kind that is found.
enum Blame : std::size_t { kItself, kHasLeft, kAnotherRank };

// How a rank has ended.
struct End {
  std::string what;
  Blame blame = kItself;
  bool may_be_intended = false;  // then only a failure for ranks that wait for this rank
};

std::optional<End> end_of(const Peer& peer) {
  const auto presence = peer.presence();
  const bool ended = peer.ended();
  if (presence == Presence::kFailing) {
    const bool blames_peer = peer.page()->blames_peer;
    if (blames_peer && !ended) {
      return std::nullopt;  // the other rank is found, too
    }
    return End{"raised an exception that ended its script", blames_peer ? kAnotherRank : kItself};
  }
  // Read at once: the kernel may forget the status when the parent reads it.
  const auto status = ended ? peer.watch()->wait_status() : std::nullopt;
  if (presence == Presence::kLeft && status.value_or(0) == 0) {
    return End{"has left (its script ended, or it destroyed its process group)", kHasLeft, true};
  }
  if (!ended) {
    return std::nullopt;
  }
  if (presence == Presence::kTerminated) {
    return End{"ended after SIGTERM", kAnotherRank, true};
  }
  // sys.exit(1) leaves with an exit code. Some scripts end with os._exit(0). In old kernels the
  // status is unknown after the parent has read it.
  const auto activity = peer.activity();
  const bool in_step = activity && activity->doing != Doing::kOutside;
  const bool may_be_intended = presence == Presence::kLeft || status == 0 || (!status && !in_step);
  return End{os::describe_ending(status), kItself, may_be_intended};
}

}  // namespace

PeerTable::PeerTable(int rank, int world_size)
    : rank_(rank), peers_(static_cast<std::size_t>(world_size)) {}

void PeerTable::meet(const std::shared_ptr<HostTable>& host, const os::ProcessId& self) {
  if (all_are_known()) {
    return;
  }
  const auto known = all();
  for (int rank = 0; rank < static_cast<int>(known.size()); ++rank) {
    const auto& entry = host->rank(rank);
    if (rank == rank_ || known[static_cast<std::size_t>(rank)] || entry.host == 0) {
      continue;
    }
    const auto who = Introduction::decode(entry.introduction.read());
    if (who && who->rank == rank) {
      add(std::make_shared<Peer>(*who, self, host));
    }
  }
}

void PeerTable::add(std::shared_ptr<Peer> peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& place = peers_.at(static_cast<std::size_t>(peer->rank()));
  if (place) {
    return;  // another thread has added the peer
  }
  if (peer->page() != nullptr) {
    auto with_page = std::make_shared<Peers>(*with_page_);
    with_page->push_back(peer);
    with_page_ = std::move(with_page);
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

PeerTable::Peers PeerTable::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_;
}

std::shared_ptr<const PeerTable::Peers> PeerTable::with_page() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return with_page_;
}

bool PeerTable::all_are_known() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count(peers_.begin(), peers_.end(), nullptr) == 1;  // this rank
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

std::optional<int> PeerTable::store_rank() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rank_names_.find(0);
}

std::optional<Failure> PeerTable::find_dead(Left left) const {
  std::array<Failure, 3> found;  // by Blame
  found[kHasLeft].kind = FailureKind::kLeft;
  for (const auto& peer : all()) {
    const auto end = peer ? end_of(*peer) : std::nullopt;
    const bool counts = left == Left::kAll || (left == Left::kOfThisHost && peer && peer->local());
    if (!end || (end->may_be_intended && !counts)) {
      continue;
    }
    auto lost = lost_rank(peer->rank(), end->what);
    lost.cause = peer->page() ? peer->page()->cause.read() : std::string();
    found[end->blame].lost.push_back(std::move(lost));
  }
  for (auto& failure : found) {
    if (!failure.lost.empty()) {
      return failure;
    }
  }
  return std::nullopt;
}

std::optional<Failure> PeerTable::find_silent(int64_t asked_ns, int64_t read_ns) const {
  Failure failure;
  const auto now = now_ns();
  for (const auto& peer : all()) {
    const auto heard = peer && !peer->local() ? peer->heard_ns() : 0;
    if (heard == 0 || now - std::max(heard, asked_ns) < times::kHostSilence ||
        now - read_ns > times::kReadIsOld) {
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
  Failure failure;
  const auto serving = store_rank();
  if (!serving) {
    failure.how = std::string("the store of the process group ") +
                  (silent ? "does not answer" : "is gone") +
                  ": rank 0 of the job, which is not in this group, or the launcher has ended or "
                  "was stopped";
  } else if (serving == rank_) {
    failure.lost.push_back(lost_rank(
        rank_, "lost the store of the process group: its process ended, or it does not answer"));
  } else {
    failure.lost.push_back(lost_rank(
        *serving,
        silent ? "or the launcher is lost or stopped: the store does not answer"
               : "or the launcher died: the store is gone"));
  }
  return failure;
}

std::optional<Failure> PeerTable::find_unknown(bool store_answers) const {
  if (all_are_known()) {
    return std::nullopt;
  }
  Failure failure;
  const auto peers = all();
  const auto is_unknown = [&](int rank) {
    return rank != rank_ && !peers[static_cast<std::size_t>(rank)];
  };
  // Without the store, other ranks cannot become known. The end of the store means that the rank
  // that serves the store is lost.
  const auto serving = store_rank();
  if (!store_answers && !serving) {
    return store_lost(/*silent=*/false);
  }
  if (!store_answers && is_unknown(*serving)) {
    const char* what = "or the launcher died: the store was lost before ranks had met";
    failure.lost.push_back(lost_rank(*serving, what));
    return failure;
  }
  const char* what = store_answers
                         ? "died before it wrapped its model, or never did"
                         : "is unknown here, since the store was lost before ranks had met";
  for (int rank = 0; rank < static_cast<int>(peers.size()); ++rank) {
    if (is_unknown(rank)) {
      failure.lost.push_back(lost_rank(rank, what));
    }
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

// ---- late --------------------------------------------------------------------------------------

std::vector<int> PeerTable::missing(const Activity& ours) const {
  std::vector<int> missing;
  const auto all = this->all();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const auto& peer = all[static_cast<std::size_t>(rank)];
    const auto theirs = peer ? peer->activity() : std::nullopt;
    if (rank != rank_ && (!theirs || peer->stopped() || is_behind(*theirs, ours))) {
      missing.push_back(rank);
    }
  }
  return missing;
}

bool PeerTable::have_written_since(int64_t time_ns, const std::vector<int>& ranks) const {
  const auto all = this->all();
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto& peer = all[static_cast<std::size_t>(rank)];
    return !peer || peer->local() || peer->heard_ns() >= time_ns;
  });
}

std::string PeerTable::describe_missing(int rank) const {
  const auto late = peer(rank);
  const auto prefix = rank_names().prefix(rank);
  if (!late) {
    return prefix + "which has not wrapped its model yet";
  }
  const auto& who = late->introduction();
  const auto last = last_activity(*late);
  return prefix + "host " + who.host + ", pid " + std::to_string(who.process.pid) + ", " +
         (last.empty() ? "its activity is unknown" : "last seen in " + last) +
         (late->presence() == Presence::kLeft ? ", has left" : "");
}

std::string PeerTable::last_activity(const Peer& peer) const {
  const auto activity = peer.activity();
  auto text = activity ? names_.describe(*activity) : std::string();
  const auto add = [&text](const std::string& more) {
    text += (text.empty() || more.empty() ? "" : ", ") + more;
  };
  add(peer.page() ? peer.page()->detail.read() : "");
  if (peer.page() && peer.page()->fault != Fault::kNone) {
    add("which raised " + peer.page()->fault_text.read());
  }
  add(peer.stopped() ? "stopped by a signal (SIGSTOP)" : "");
  return text;
}

}  // namespace ddpx::health
