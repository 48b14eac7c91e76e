#include "peers.h"

#include <poll.h>

#include <algorithm>
#include <sstream>

#include "error.h"

namespace ddpx::shm {
namespace {

// A peer sends a segment before the operation that refers to the segment. The message is therefore
// missing only if the peer is gone.
constexpr auto kSegmentTimeout = std::chrono::seconds(5);

// The number of ids that fit into one message. Further ids go into the next message.
constexpr std::size_t kMaxDrops = 32;

}  // namespace

Peers::Peers(RendezvousResult rendezvous, int rank)
    : topology_(std::move(rendezvous.topology)),
      ranks_(topology_.local_ranks(rank)),
      local_peers_(std::move(rendezvous.local_peers)),
      segments_(local_peers_.size()),
      own_index_(topology_.local_rank_of[rank]) {
  for (const auto& local_peer : local_peers_) {
    processes_.push_back(
        local_peer.connection ? local_peer.connection->watch_process() : UniqueFd());
  }
}

std::optional<std::string> Peers::loss_of(int index) const {
  if (index == own_index_) {
    return std::nullopt;
  }
  // Both the process and the connection are checked, since each can fail to show a death: a child
  // of a dead process may hold its sockets open, and a process in another namespace has no pidfd.
  pollfd process{processes_[index].get(), POLLIN, 0};
  if (processes_[index] && poll(&process, 1, 0) > 0) {
    return "died (its process ended without leaving the group)";
  }
  const auto left = static_cast<uint32_t>(Presence::kLeft);
  if (home(index).presence.load(std::memory_order_acquire) == left) {
    return "left the group (its process group was destroyed)";
  }
  if (local_peers_[index].connection->hung_up()) {
    return "closed its connection (it died, or its process group was destroyed)";
  }
  return std::nullopt;
}

std::vector<Loss> Peers::losses() const {
  std::vector<Loss> losses;
  for (int index = 0; index < size(); ++index) {
    if (auto what = loss_of(index)) {
      losses.push_back({rank_of(index), std::move(*what)});
    }
  }
  return losses;
}

void Peers::announce(const Arena& arena, uint32_t segment) {
  if (std::find(announced_.begin(), announced_.end(), segment) != announced_.end()) {
    return;
  }
  std::string message = std::to_string(segment);
  std::vector<uint32_t> kept;
  std::size_t num_drops = 0;
  for (const auto id : announced_) {
    if (num_drops < kMaxDrops && arena.segment_fd(id) < 0) {
      message += " " + std::to_string(id);
      ++num_drops;
    } else {
      kept.push_back(id);
    }
  }
  for (int index = 0; index < size(); ++index) {
    if (index != own_index_) {
      try {
        local_peers_[index].connection->send(message, arena.segment_fd(segment));
      } catch (const Error& error) {
        throw Error(
            ErrorKind::kPeerLost,
            list_ranks({rank_of(index)}) + " " +
                loss_of(index).value_or("did not accept a segment of shared memory") + ": " +
                error.what(),
            {rank_of(index)});
      }
    }
  }
  announced_ = std::move(kept);
  announced_.push_back(segment);
}

void Peers::receive_segment(int index) {
  auto message = local_peers_[index].connection->receive(Clock::now() + kSegmentTimeout);
  if (!message || !message->fd) {
    throw Error(
        ErrorKind::kPeerLost,
        list_ranks({rank_of(index)}) + " " +
            loss_of(index).value_or("did not pass a segment of shared memory") +
            ". See the output of that rank.",
        {rank_of(index)});
  }
  std::istringstream ids(message->bytes);
  uint32_t id = 0;
  ids >> id;
  segments_[index][id] = map_shared(message->fd.get());
  while (ids >> id) {
    segments_[index].erase(id);
  }
}

std::byte* Peers::locate(int index, const BufferRef& buffer) {
  auto& segments = segments_[index];
  while (segments.find(buffer.segment) == segments.end()) {
    receive_segment(index);
  }
  return segments[buffer.segment]->data() + buffer.offset;
}

}  // namespace ddpx::shm
