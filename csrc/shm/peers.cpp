#include "peers.h"

#include <poll.h>

#include <algorithm>
#include <sstream>

#include "error.h"

namespace ddpx::shm {
namespace {

// A segment is sent before the operation that refers to it, so it is there unless the peer is not.
constexpr auto kSegmentTimeout = std::chrono::seconds(5);

// Ids that fit into one message with room to spare; the rest goes with the next.
constexpr std::size_t kMaxDrops = 32;

}  // namespace

Peers::Peers(Meeting meeting, int rank)
    : topology_(std::move(meeting.topology)),
      ranks_(topology_.neighbours(rank)),
      neighbours_(std::move(meeting.neighbours)),
      segments_(neighbours_.size()),
      own_index_(topology_.local_rank_of[rank]) {
  for (const auto& neighbour : neighbours_) {
    processes_.push_back(neighbour.connection ? neighbour.connection->watch_process() : UniqueFd());
  }
}

std::optional<std::string> Peers::loss_of(int index) const {
  if (index == own_index_) {
    return std::nullopt;
  }
  // Both, because either may fail to tell: a child of a dead process can hold its sockets open,
  // and a process in another namespace cannot be watched.
  pollfd process{processes_[index].get(), POLLIN, 0};
  if (processes_[index] && poll(&process, 1, 0) > 0) {
    return "died (its process ended without leaving the group)";
  }
  const auto left = static_cast<uint32_t>(Presence::kLeft);
  if (home(index).presence.load(std::memory_order_acquire) == left) {
    return "left the group (its process group was destroyed)";
  }
  if (neighbours_[index].connection->hung_up()) {
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
        neighbours_[index].connection->send(message, arena.segment_fd(segment));
      } catch (const Error& error) {
        throw Error(
            ErrorKind::kPeerLost,
            list_ranks({rank_of(index)}) + " " +
                loss_of(index).value_or("did not take memory over") + ": " + error.what(),
            {rank_of(index)});
      }
    }
  }
  announced_ = std::move(kept);
  announced_.push_back(segment);
}

void Peers::receive_segment(int index) {
  auto message = neighbours_[index].connection->receive(Clock::now() + kSegmentTimeout);
  if (!message || !message->fd) {
    throw Error(
        ErrorKind::kPeerLost,
        list_ranks({rank_of(index)}) + " " +
            loss_of(index).value_or("did not hand over its memory") + ". See that rank's output.",
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
