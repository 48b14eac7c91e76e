#include "peer_table.h"

#include <algorithm>
#include <utility>

namespace ddpx::health {

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
    return prefix + "which has no wrapper of this process group yet";
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
