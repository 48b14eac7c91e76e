#include "lost_ranks.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "../times.h"

namespace ddpx::health {
namespace {

// The cause of the end of a rank. The report has only ranks of the first kind that is found.
enum Blame : std::size_t { kItself, kHasLeft, kAnotherRank };

// The end of a rank.
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

std::optional<Failure> find_dead(const PeerTable& peers, Left left) {
  std::array<Failure, 3> found;  // by Blame
  found[kHasLeft].kind = FailureKind::kLeft;
  for (const auto& peer : peers.all()) {
    const auto end = peer ? end_of(*peer) : std::nullopt;
    const bool counts = left == Left::kAll || (left == Left::kOfThisHost && peer && peer->local());
    if (!end || (end->may_be_intended && !counts)) {
      continue;
    }
    auto lost = peers.lost_rank(peer->rank(), end->what);
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

std::optional<Failure> find_silent(const PeerTable& peers, int64_t asked_ns, int64_t read_ns) {
  Failure failure;
  const auto now = now_ns();
  for (const auto& peer : peers.all()) {
    const auto heard = peer && !peer->local() ? peer->heard_ns() : 0;
    if (heard == 0 || now - std::max(heard, asked_ns) < times::kHostSilence ||
        now - read_ns > times::kReadIsOld) {
      continue;
    }
    failure.lost.push_back(peers.lost_rank(
        peer->rank(),
        "has not been heard of for " + in_seconds(now - heard) +
            " s, and the communication failed: it, or its machine, died or was stopped"));
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

Failure store_lost(const PeerTable& peers, bool silent) {
  Failure failure;
  const auto serving = peers.store_rank();
  if (!serving) {
    failure.how = std::string("the store of the process group ") +
                  (silent ? "does not answer" : "is gone") +
                  ": rank 0 of the job, which is not in this group, or the launcher has ended or "
                  "was stopped";
  } else if (serving == peers.rank()) {
    failure.lost.push_back(peers.lost_rank(
        peers.rank(),
        "lost the store of the process group: its process ended, or it does not answer"));
  } else {
    failure.lost.push_back(peers.lost_rank(
        *serving,
        silent ? "or the launcher is lost or stopped: the store does not answer"
               : "or the launcher died: the store is gone"));
  }
  return failure;
}

std::optional<Failure> find_unknown(const PeerTable& peers, bool store_answers) {
  if (peers.all_are_known()) {
    return std::nullopt;
  }
  Failure failure;
  const auto all = peers.all();
  const auto is_unknown = [&](int rank) {
    return rank != peers.rank() && !all[static_cast<std::size_t>(rank)];
  };
  // Without the store, other ranks cannot become known. The end of the store means that the rank
  // that serves the store is lost.
  const auto serving = peers.store_rank();
  if (!store_answers && !serving) {
    return store_lost(peers, /*silent=*/false);
  }
  if (!store_answers && is_unknown(*serving)) {
    const char* what = "or the launcher died: the store was lost before ranks had met";
    failure.lost.push_back(peers.lost_rank(*serving, what));
    return failure;
  }
  const char* what =
      store_answers ? "died before it wrapped a model with this process group, never wrapped one, "
                      "or cannot be monitored (it then printed a warning)"
                    : "is unknown here, since the store was lost before ranks had met";
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (is_unknown(rank)) {
      failure.lost.push_back(peers.lost_rank(rank, what));
    }
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

}  // namespace ddpx::health
