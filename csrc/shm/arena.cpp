#include "arena.h"

#include <algorithm>
#include <iterator>

#include "error.h"

namespace ddpx::shm {
namespace {

// Small blocks share a segment; a large one gets one of its own, so that its pages go when it goes.
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

// First fit.
void* Arena::Segment::take(std::size_t num_bytes) {
  const auto fits = [&](const auto& gap) { return gap.second >= num_bytes; };
  const auto gap = std::find_if(gaps.begin(), gaps.end(), fits);
  if (gap == gaps.end()) {
    return nullptr;
  }
  const auto offset = gap->first;
  blocks.emplace(offset, num_bytes);
  auto rest = gaps.extract(gap);
  rest.key() += num_bytes;
  rest.mapped() -= num_bytes;
  if (rest.mapped() > 0) {
    gaps.insert(std::move(rest));
  }
  return begin() + offset;
}

bool Arena::Segment::give_back(void* block) {
  const auto known =
      blocks.find(static_cast<std::size_t>(static_cast<std::byte*>(block) - begin()));
  if (known == blocks.end()) {
    return false;
  }
  auto gap = gaps.insert(blocks.extract(known)).position;
  const auto next = std::next(gap);
  if (next != gaps.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    gaps.erase(next);
  }
  if (gap != gaps.begin()) {
    const auto previous = std::prev(gap);
    if (previous->first + previous->second == gap->first) {
      previous->second += gap->second;
      gaps.erase(gap);
    }
  }
  return true;
}

void* Arena::take_from_new_segment(std::size_t num_bytes) {
  const auto segment_bytes =
      num_bytes >= kOwnSegmentBytes ? round_up(num_bytes, page_bytes()) : kSharedSegmentBytes;
  std::list<Segment> segments(1);
  auto& segment = segments.front();
  segment.id = next_id_++;
  segment.fd = create_memory(segment_bytes, kPurpose);
  segment.mapping = map_shared(segment.fd.get());
  segment.gaps.emplace(0, segment_bytes);
  auto* block = segment.take(num_bytes);
  segments_.splice(segments_.end(), segments);
  return block;
}

void* Arena::allocate(std::size_t num_bytes) {
  const auto block_bytes = round_up(std::max(num_bytes, std::size_t{1}), kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& segment : segments_) {
    if (auto* block = segment.take(block_bytes)) {
      return block;
    }
  }
  return take_from_new_segment(block_bytes);
}

void Arena::free(void* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto segment = std::find_if(segments_.begin(), segments_.end(), [&](const auto& candidate) {
    return candidate.contains(block, 1);
  });
  if (segment == segments_.end() || !segment->give_back(block)) {
    throw Error(ErrorKind::kMisuse, "[ddpx shm] freed a block that the arena does not know");
  }
  drop_if_empty(segment);
}

// One empty segment for small blocks is kept, lest a loop that allocates and frees one of them
// creates memory each time.
void Arena::drop_if_empty(std::list<Segment>::iterator segment) {
  const auto is_spare = [](const Segment& candidate) {
    return candidate.blocks.empty() && candidate.mapping->num_bytes() == kSharedSegmentBytes;
  };
  if (!segment->blocks.empty() ||
      (is_spare(*segment) && std::count_if(segments_.begin(), segments_.end(), is_spare) == 1)) {
    return;
  }
  // Peers may have it mapped until they hear of it; the pages shall not wait for that.
  release_pages(segment->fd.get(), 0, segment->mapping->num_bytes());
  segments_.erase(segment);
}

std::optional<Location> Arena::locate(const void* data, std::size_t num_bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& segment : segments_) {
    if (segment.contains(data, num_bytes)) {
      return Location{
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
