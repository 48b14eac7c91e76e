#include "arena.h"

#include <algorithm>
#include <iterator>

#include "error.h"

namespace ddpx::shm {
namespace {

// Small blocks share a segment. A large block has its own segment, so that its pages return to the
// system when it is freed.
constexpr std::size_t kSharedSegmentBytes = std::size_t{4} << 20;
constexpr std::size_t kOwnSegmentBytes = std::size_t{1} << 20;
constexpr const char* kPurpose = "tensors (gradient buckets)";

}  // namespace

bool Arena::Segment::contains(const void* data, std::size_t num_bytes) const {
  const auto first = reinterpret_cast<uintptr_t>(begin());
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address >= first && address - first <= mapping->num_bytes() &&
         num_bytes <= mapping->num_bytes() - (address - first);
}

// Takes the first free range that is large enough.
void* Arena::Segment::allocate(std::size_t num_bytes) {
  const auto fits = [&](const auto& range) { return range.second >= num_bytes; };
  const auto range = std::find_if(free_ranges.begin(), free_ranges.end(), fits);
  if (range == free_ranges.end()) {
    return nullptr;
  }
  const auto offset = range->first;
  blocks.emplace(offset, num_bytes);
  auto rest = free_ranges.extract(range);
  rest.key() += num_bytes;
  rest.mapped() -= num_bytes;
  if (rest.mapped() > 0) {
    free_ranges.insert(std::move(rest));
  }
  return begin() + offset;
}

bool Arena::Segment::free(void* block) {
  const auto known =
      blocks.find(static_cast<std::size_t>(static_cast<std::byte*>(block) - begin()));
  if (known == blocks.end()) {
    return false;
  }
  auto range = free_ranges.insert(blocks.extract(known)).position;
  const auto next = std::next(range);
  if (next != free_ranges.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_ranges.erase(next);
  }
  if (range != free_ranges.begin()) {
    const auto previous = std::prev(range);
    if (previous->first + previous->second == range->first) {
      previous->second += range->second;
      free_ranges.erase(range);
    }
  }
  return true;
}

void* Arena::allocate_in_new_segment(std::size_t num_bytes) {
  const auto segment_bytes = num_bytes >= kOwnSegmentBytes
                                 ? os::round_up(num_bytes, os::page_bytes())
                                 : kSharedSegmentBytes;
  std::list<Segment> segments(1);
  auto& segment = segments.front();
  segment.id = next_id_++;
  with_own_errors([&] {
    segment.fd = os::create_memory(segment_bytes, kPurpose, reserved_bytes_.get());
    segment.mapping = os::map_shared(segment.fd.get());
  });
  segment.free_ranges.emplace(0, segment_bytes);
  auto* block = segment.allocate(num_bytes);
  segments_.splice(segments_.end(), segments);
  return block;
}

void* Arena::allocate(std::size_t num_bytes) {
  const auto block_bytes = os::round_up(std::max(num_bytes, std::size_t{1}), kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& segment : segments_) {
    if (auto* block = segment.allocate(block_bytes)) {
      return block;
    }
  }
  return allocate_in_new_segment(block_bytes);
}

void Arena::share_reservations(std::shared_ptr<std::atomic<uint64_t>> reserved_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reserved_bytes_ = std::move(reserved_bytes);
}

void Arena::free(void* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto segment = std::find_if(segments_.begin(), segments_.end(), [&](const auto& candidate) {
    return candidate.contains(block, 1);
  });
  if (segment == segments_.end() || !segment->free(block)) {
    throw Error(ErrorKind::kMisuse, "[ddpx shm] the freed block does not belong to this arena");
  }
  drop_if_empty(segment);
}

// The arena keeps one empty segment for small blocks. A loop that allocates and frees a small block
// then does not create a segment in each round.
void Arena::drop_if_empty(std::list<Segment>::iterator segment) {
  const auto is_spare = [](const Segment& candidate) {
    return candidate.blocks.empty() && candidate.mapping->num_bytes() == kSharedSegmentBytes;
  };
  if (!segment->blocks.empty() ||
      (is_spare(*segment) && std::count_if(segments_.begin(), segments_.end(), is_spare) == 1)) {
    return;
  }
  // Peers unmap the segment later, in `Peers::receive_segment`. The pages are released now.
  os::release_pages(segment->fd.get(), 0, segment->mapping->num_bytes());
  segments_.erase(segment);
}

std::optional<BufferRef> Arena::locate(const void* data, std::size_t num_bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& segment : segments_) {
    if (segment.contains(data, num_bytes)) {
      return BufferRef{
          segment.id, static_cast<uint64_t>(static_cast<const std::byte*>(data) - segment.begin())};
    }
  }
  return std::nullopt;
}

int Arena::segment_fd(uint32_t id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& segment : segments_) {
    if (segment.id == id) {
      return segment.fd.get();
    }
  }
  return -1;
}

std::size_t Arena::resident_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t num_bytes = 0;
  for (const auto& segment : segments_) {
    num_bytes += segment.mapping->num_bytes();
  }
  return num_bytes;
}

}  // namespace ddpx::shm
