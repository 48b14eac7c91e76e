#include "peers.h"

#include <algorithm>
#include <sstream>

#include "error.h"

namespace ddpx::shm {
namespace {

// Poll interval for dead peers, and for segments of other peers, while a rank waits for a segment.
constexpr auto kSegmentPoll = std::chrono::milliseconds(5);

// The number of ids that fit into one message. Further ids go into the next message.
constexpr std::size_t kMaxDrops = 32;

}  // namespace

Peers::Peers(RendezvousResult rendezvous, int rank)
    : topology_(std::move(rendezvous.topology)),
      ranks_(topology_.local_ranks(rank)),
      local_peers_(std::move(rendezvous.local_peers)),
      segments_(local_peers_.size()),
      own_index_(topology_.local_rank_of[rank]) {}

std::optional<std::string> Peers::loss_of(int index) const {
  if (index == own_index_) {
    return std::nullopt;
  }
  if (has_left(index)) {
    return "left the group (its process group was destroyed)";
  }
  // Both the process and the connection are checked, since each can fail to show a death: a child
  // of a dead process may hold its sockets open, and a process in another namespace is not seen.
  const auto& connection = *local_peers_[index].connection;
  if (connection.process_ended()) {
    return "died (its process ended without leaving the group)";
  }
  if (connection.hung_up()) {
    return "closed its connection (it died, or its process group was destroyed)";
  }
  return std::nullopt;
}

bool Peers::has_left(int index) const {
  return home(index).has_left.load(std::memory_order_acquire);
}

void Peers::announce(const Arena& arena, uint32_t segment, const Check& check) {
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
  const auto while_full = [&] {
    check();
    receive_segments();
  };
  for (int index = 0; index < size(); ++index) {
    if (index != own_index_ &&
        !local_peers_[index].connection->send(message, arena.segment_fd(segment), while_full)) {
      throw lost(index);
    }
  }
  announced_ = std::move(kept);
  announced_.push_back(segment);
}

Error Peers::lost(int index) const {
  return Error(
      ErrorKind::kPeerLost,
      name_of(index) + " " + loss_of(index).value_or("closed its connection") +
          ". See the output of that rank.",
      rank_of(index));
}

// Peers may wait until their memory files are received, since the kernel limits the number of files
// that are on their way.
void Peers::receive_segments() {
  for (int index = 0; index < size(); ++index) {
    if (index != own_index_) {
      receive_segment(index, Clock::now());
    }
  }
}

// Returns false if no message arrived by the deadline.
bool Peers::receive_segment(int index, Clock::time_point deadline) {
  auto message = local_peers_[index].connection->receive(deadline);
  if (!message) {
    return false;
  }
  const auto fd = message->take_fd();
  std::istringstream ids(message->bytes);
  uint32_t id = 0;
  ids >> id;
  segments_[index][id] = with_own_errors([&] { return os::map_shared(fd.get()); });
  while (ids >> id) {
    segments_[index].erase(id);
  }
  return true;
}

std::byte* Peers::locate(
    int index, const BufferRef& buffer, std::size_t num_bytes, const Check& check) {
  auto& segments = segments_[index];
  while (segments.find(buffer.segment) == segments.end()) {
    if (!receive_segment(index, Clock::now() + kSegmentPoll)) {
      check();
      receive_segments();
      if (loss_of(index)) {
        throw lost(index);
      }
    }
  }
  const auto& segment = *segments[buffer.segment];
  if (buffer.offset > segment.num_bytes() || num_bytes > segment.num_bytes() - buffer.offset) {
    throw Error(
        ErrorKind::kSystem,
        name_of(index) + " published a buffer of " + std::to_string(num_bytes) +
            " bytes at offset " + std::to_string(buffer.offset) + " of a segment of " +
            std::to_string(segment.num_bytes()) +
            " bytes. Its memory is corrupt: look for code that writes out of bounds.",
        rank_of(index));
  }
  return segment.data() + buffer.offset;
}

}  // namespace ddpx::shm
