// Shared memory for tensors. Local peers can map it, so operations can work on it in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "../os/memory.h"
#include "layout.h"

namespace ddpx::shm {

// The allocator of one rank. It grows by memory files, called segments. The backend, the group and
// every allocated tensor share its ownership. Thread-safe; `mutex_` guards all members. All blocks
// must be freed before the arena is destroyed. A peer's mapping of a segment is independent of the
// arena.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  // The memory is not zeroed. Throws kOutOfMemory.
  void* allocate(std::size_t num_bytes);

  // Makes this arena and those of other ranks respect each other's allocations, through a counter
  // in shared memory (see `create_memory`).
  void share_reservations(std::shared_ptr<std::atomic<uint64_t>> reserved_bytes);

  // No operation on any rank may be using the block. An empty segment returns its memory to the
  // system, even if peers still have the segment mapped.
  void free(void* block);

  // Returns nullopt unless the whole range lies in one segment.
  std::optional<BufferRef> locate(const void* data, std::size_t num_bytes) const;

  // The descriptor to pass to peers, which the arena owns; -1 if the segment does not exist.
  int segment_fd(uint32_t segment) const;

  // The size of all segments in bytes, including memory that is not allocated.
  std::size_t resident_bytes() const;

 private:
  struct Segment {
    uint32_t id;
    os::UniqueFd fd;
    std::shared_ptr<os::Mapping> mapping;
    // Maps of offset to size. `free` moves the node of the block to `free_ranges`, which cannot
    // fail: tensors free their memory in destructors.
    std::map<std::size_t, std::size_t> free_ranges;  // no two of them are adjacent
    std::map<std::size_t, std::size_t> blocks;

    std::byte* begin() const {
      return mapping->data();
    }

    bool contains(const void* data, std::size_t num_bytes) const;
    void* allocate(std::size_t num_bytes);  // null if no free range is large enough
    bool free(void* block);                 // false if the block is unknown
  };

  void* allocate_in_new_segment(std::size_t num_bytes);
  void drop_if_empty(std::list<Segment>::iterator segment);

  mutable std::mutex mutex_;
  std::list<Segment> segments_;
  uint32_t next_id_ = 1;
  std::shared_ptr<std::atomic<uint64_t>> reserved_bytes_;
};

}  // namespace ddpx::shm
