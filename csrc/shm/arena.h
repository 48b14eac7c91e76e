// Memory that operations can work on in place, since local peers can map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "memory.h"

namespace ddpx::shm {

// Where a buffer lies: what a peer needs to find it, but for the file itself.
struct Location {
  uint32_t segment;
  uint64_t offset;
};

// One rank's own allocations, in memory files that it grows by. Thread-safe. Blocks must be freed
// before it is destroyed; peers that have mapped a segment keep it for themselves until they leave.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  // Not zeroed. Throws kOutOfMemory.
  void* allocate(std::size_t num_bytes);

  // The memory of a segment with nothing left in it goes back to the system, though peers may still
  // have it mapped. No operation may be using the block, on any rank.
  void free(void* block);

  // Nothing unless the whole range lies in one allocated segment.
  std::optional<Location> locate(const void* data, std::size_t num_bytes) const;

  // To hand over to a peer; -1 if there is no such segment (any more). Owned by the arena.
  int segment_fd(uint32_t segment) const;

  // Bytes of memory that it holds, used or not.
  std::size_t resident_bytes() const;

 private:
  struct Segment {
    uint32_t id;
    UniqueFd fd;
    std::shared_ptr<Mapping> mapping;
    // Offset -> bytes. A block that is freed becomes a gap by moving its node, which cannot fail:
    // tensors free their memory in destructors.
    std::map<std::size_t, std::size_t> gaps;  // never adjacent
    std::map<std::size_t, std::size_t> blocks;

    std::byte* begin() const {
      return mapping->data();
    }

    bool contains(const void* data, std::size_t num_bytes) const;
    void* take(std::size_t num_bytes);  // null if there is no room
    bool give_back(void* block);        // false if it does not know the block
  };

  void* take_from_new_segment(std::size_t num_bytes);
  void drop_if_empty(std::list<Segment>::iterator segment);

  mutable std::mutex mutex_;
  std::list<Segment> segments_;
  uint32_t next_id_ = 1;
};

}  // namespace ddpx::shm
