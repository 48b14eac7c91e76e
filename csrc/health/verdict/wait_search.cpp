#include "wait_search.h"

#include <algorithm>

namespace ddpx::health {
namespace {

// Whether a rank at `theirs` has not launched a bucket that a rank at `ours` has launched. False if
// the wrappers differ: ranks may use several wrappers in turn, and hosts run ahead of the device.
bool has_not_launched(const Activity& theirs, const Activity& ours) {
  return theirs.model == ours.model && is_behind(theirs, ours);
}

}  // namespace

bool is_behind_on_device(const std::optional<Activity>& theirs, const Activity& ours) {
  return theirs && theirs->doing == Doing::kBackward && theirs->model == ours.model &&
         theirs->step <= ours.step;
}

std::vector<int> missing_ranks(const PeerTable& peers, const Wait& wait) {
  if (!wait.on_device()) {
    return peers.missing(wait.at);
  }
  auto missing = wait.missing;
  for (const auto& peer : peers.all()) {
    const bool cannot_come =
        peer && (peer->stopped() || peer->ended() || peer->presence() == Presence::kLeft);
    if (wait.missing.empty() && cannot_come) {
      missing.push_back(peer->rank());
    }
  }
  return missing;
}

std::optional<Wait> WaitSearch::find(int64_t now_ns) {
  const auto own = state_.activity();
  if (may_wait(own.doing)) {
    return Wait{own};
  }
  return state_.group.on_device ? on_device(own, now_ns) : std::nullopt;
}

std::optional<Wait> WaitSearch::on_device(const Activity& own, int64_t now_ns) {
  const auto& page = state_.page.view();
  const auto device = page.device.known().value_or(Activity{});
  const bool device_waits = device.doing == Doing::kWaiting;
  Wait wait{
      device_waits ? device : own,
      Wait::Kind::kLaunched,
      late_hosts(own, now_ns),
      last_left_ns(now_ns)};
  const auto uncertain = device_waits ? Wait::Kind::kDevice : Wait::Kind::kCalls;
  if (!wait.missing.empty()) {
    // A rank that is less late may wait for a rank that is later.
    const auto calls_of = [&](int rank) { return late_[static_cast<std::size_t>(rank)].num_calls; };
    uint64_t fewest = UINT64_MAX;
    for (const int rank : wait.missing) {
      fewest = std::min(fewest, calls_of(rank));
    }
    std::erase_if(wait.missing, [&](int rank) { return calls_of(rank) > fewest; });
    wait.at.since_ns = now_ns;
    for (const int rank : wait.missing) {
      const auto& late = late_[static_cast<std::size_t>(rank)];
      wait.at.since_ns = std::min(wait.at.since_ns, late.since_ns);
      wait.kind = late.is_certain ? wait.kind : uncertain;
    }
    return wait;
  }
  if (!device_waits) {
    return std::nullopt;
  }
  wait.missing = late_devices(device);
  wait.kind = uncertain;
  return wait;
}

std::vector<int> WaitSearch::late_hosts(const Activity& own, int64_t now_ns) {
  const auto peers = state_.peers.all();
  std::vector<int> found;
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    const auto& peer = peers[rank];
    auto& late = late_[rank];
    bool is_certain = false;
    if (!peer || !is_late(*peer, own, &is_certain)) {
      late = {};
      continue;
    }
    if (const auto calls = peer->num_calls(); late.since_ns == 0 || late.num_calls != calls) {
      late = {now_ns, calls};
    }
    late.is_certain = is_certain;
    found.push_back(static_cast<int>(rank));
  }
  return found;
}

bool WaitSearch::is_late(const Peer& peer, const Activity& own, bool* is_certain) const {
  const auto theirs = peer.activity();
  const auto& page = state_.page.view();
  const auto device = page.device.known().value_or(Activity{});
  const bool device_waits = device.doing == Doing::kWaiting;
  if (!theirs || (!peer.local() && !device_waits)) {
    return false;
  }
  const bool has_launched = own.doing == Doing::kBackward && own.bucket > 0;
  *is_certain = (has_launched && has_not_launched(*theirs, own)) ||
                (device_waits && has_not_launched(*theirs, device));
  const auto calls = peer.num_calls();
  if (!*is_certain && (calls == 0 || calls >= page.num_calls)) {
    return false;
  }
  // A host that waits for its own device is not late: late_devices() checks the device. A stopped
  // process does not publish what its device does.
  return !peer.device() || peer.stopped();
}

int64_t WaitSearch::last_left_ns(int64_t now_ns) {
  const auto peers = state_.peers.all();
  int64_t last = 0;
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    const auto& peer = peers[rank];
    const bool has_left = peer && (peer->presence() == Presence::kLeft || peer->ended());
    left_ns_[rank] = !has_left ? 0 : left_ns_[rank] != 0 ? left_ns_[rank] : now_ns;
    last = std::max(last, left_ns_[rank]);
  }
  return last;
}

std::vector<int> WaitSearch::late_devices(const Activity& waiting) const {
  const auto peers = state_.peers.all();
  std::vector<int> found;
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    if (peers[rank] && is_behind_on_device(peers[rank]->device(), waiting)) {
      found.push_back(static_cast<int>(rank));
    }
  }
  return found;
}

}  // namespace ddpx::health
