#include "allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "streams.h"

namespace late {
namespace {

constexpr std::size_t kAlignment = 64;  // that of torch on CPU, on which the bits of kernels depend
constexpr int kPoison = 0xff;           // a NaN in every floating-point type, and -1

enum class State { kInUse, kDeferred, kFree };

struct Block {
  char* begin;
  std::size_t num_bytes;
  Queue* home;  // null for pinned host memory
  State state = State::kFree;
  int64_t release = 0;                   // number of its last release
  std::map<Queue*, Position> uses = {};  // the last use of each queue
  std::set<Queue*> recorded = {};

  // The best block is the smallest one, and of equal ones the block that was released last.
  auto order() const {
    return std::make_tuple(home, num_bytes, -release);
  }
};

using Waits = std::map<Queue*, Position>;

bool passed(const Waits& waits) {
  return std::all_of(
      waits.begin(), waits.end(), [](const auto& wait) { return wait.first->passed(wait.second); });
}

struct Heap {
  std::mutex mutex;
  std::map<const char*, Block*> blocks;                             // all, by begin
  std::map<std::tuple<Queue*, std::size_t, int64_t>, Block*> free;  // by order()
  std::vector<std::pair<Block*, Waits>> deferred;                   // freed, but not reusable yet
  int64_t num_releases = 0;
};

Heap& heap() {
  static auto* const instance = new Heap;
  return *instance;
}

void poison(char* begin, std::size_t num_bytes) {
  std::memset(begin, kPoison, num_bytes);
}

// The caller of these functions must hold the heap's mutex.

// Makes one block of two neighbours in memory, if both are free. malloc() leaves a gap between its
// allocations, so both are parts of one allocation.
void merge(Heap& h, Block* first, Block* second) {
  if (first->state != State::kFree || second->state != State::kFree ||
      first->begin + first->num_bytes != second->begin) {
    return;
  }
  h.free.erase(first->order());
  h.free.erase(second->order());
  h.blocks.erase(second->begin);
  first->num_bytes += second->num_bytes;
  first->release = std::max(first->release, second->release);
  h.free[first->order()] = first;
  delete second;
}

void add_free(Heap& h, Block* block) {
  block->state = State::kFree;
  h.free[block->order()] = block;
  const auto at = h.blocks.find(block->begin);
  if (const auto next = std::next(at); next != h.blocks.end()) {
    merge(h, block, next->second);
  }
  if (at != h.blocks.begin()) {
    merge(h, std::prev(at)->second, block);
  }
}

// Takes the best free block out of the heap; null if there is none of this size or more.
Block* take_free(Heap& h, Queue* home, std::size_t num_bytes) {
  const auto best = h.free.lower_bound({home, num_bytes, std::numeric_limits<int64_t>::min()});
  if (best == h.free.end() || best->second->home != home) {
    return nullptr;
  }
  auto* block = best->second;
  h.free.erase(best);
  if (block->num_bytes > num_bytes) {
    auto* rest = new Block{block->begin + num_bytes, block->num_bytes - num_bytes, home};
    rest->release = block->release;
    block->num_bytes = num_bytes;
    h.blocks[rest->begin] = rest;
    h.free[rest->order()] = rest;
  }
  return block;
}

void reuse(Heap& h, Block* block) {
  if (block->home == nullptr) {
    poison(block->begin, block->num_bytes);
  } else {
    auto& home = *block->home;
    const auto poisoned = home.push("poison", [begin = block->begin, num_bytes = block->num_bytes] {
      poison(begin, num_bytes);
    });
    const bool used_elsewhere =
        std::any_of(block->uses.begin(), block->uses.end(), [&](const auto& use) {
          return use.first != &home && !use.first->passed(use.second);
        });
    if (used_elsewhere) {
      home.demand(poisoned);  // without an event, this comes before the other stream's work
    }
  }
  block->uses.clear();
  block->recorded.clear();
  add_free(h, block);
}

void reuse_what_has_waited(Heap& h) {
  const auto due =
      std::stable_partition(h.deferred.begin(), h.deferred.end(), [](const auto& entry) {
        return !passed(entry.second);
      });
  for (auto entry = due; entry != h.deferred.end(); ++entry) {
    reuse(h, entry->first);
  }
  h.deferred.erase(due, h.deferred.end());
}

void release(void* context) {
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  auto* block = static_cast<Block*>(context);
  block->release = ++h.num_releases;
  Waits waits;
  if (block->home == nullptr) {
    waits = block->uses;
  }
  for (auto* queue : block->recorded) {
    waits[queue] = queue->last();
  }
  if (passed(waits)) {
    reuse(h, block);
  } else {
    block->state = State::kDeferred;
    h.deferred.emplace_back(block, std::move(waits));
  }
}

c10::DataPtr take(Queue* home, std::size_t num_bytes, c10::Device device) {
  if (num_bytes == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  }
  const auto rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  reuse_what_has_waited(h);
  auto* block = take_free(h, home, rounded);
  if (block == nullptr) {
    auto* const begin = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    poison(begin, rounded);
    block = new Block{begin, rounded, home};
    h.blocks[begin] = block;
  }
  block->state = State::kInUse;
  return {block->begin, block, &release, device};
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    const auto device = current_device();
    return take(&current_queue(device), num_bytes, device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    for (int index = 0; index < kNumDevices; ++index) {
      synchronize_device({kType, static_cast<c10::DeviceIndex>(index)});
    }
    std::memcpy(target, source, num_bytes);
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    return take(nullptr, num_bytes, c10::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

// The block in use of one of these allocators that contains the memory, or null.
Block* block_at(Heap& h, const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  const auto next = h.blocks.upper_bound(at);
  if (next == h.blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(next)->second;
  const bool inside = at < block->begin + block->num_bytes;
  return inside && block->state == State::kInUse ? block : nullptr;
}

}  // namespace

c10::Allocator* device_allocator() {
  static auto* const instance = new DeviceAllocator;
  return instance;
}

c10::Allocator* pinned_allocator() {
  static auto* const instance = new PinnedAllocator;
  return instance;
}

bool is_pinned(const void* pointer) {
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  const auto* block = block_at(h, pointer);
  return block != nullptr && block->home == nullptr;
}

void record_use(const c10::DataPtr& memory, Queue& queue, Position position) {
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  if (auto* block = block_at(h, memory.get())) {
    block->uses[&queue] = position;
  }
}

int64_t num_bytes_in_use(int device) {
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  int64_t num_bytes = 0;
  for (const auto& [begin, block] : h.blocks) {
    if (block->state == State::kInUse && block->home != nullptr &&
        block->home->device() == device) {
      num_bytes += static_cast<int64_t>(block->num_bytes);
    }
  }
  return num_bytes;
}

void record_on(const c10::DataPtr& memory, Queue& queue) {
  auto& h = heap();
  const std::lock_guard<std::mutex> lock(h.mutex);
  auto* block = block_at(h, memory.get());
  if (block != nullptr && block->home != nullptr && block->home != &queue) {
    block->recorded.insert(&queue);
  }
}

}  // namespace late
