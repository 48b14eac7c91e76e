#include "allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "streams.h"

namespace late {
namespace {

constexpr std::size_t kAlignment = 64;  // that of torch on CPU, on which the bits of kernels depend
constexpr int kPoison = 0xff;           // a NaN in every floating-point type, and -1

struct Block {
  void* begin;
  std::size_t num_bytes;
  Queue* home;                      // null for pinned host memory
  std::map<Queue*, Position> uses;  // the last use of each queue
  std::set<Queue*> recorded;
};

using Waits = std::map<Queue*, Position>;

bool passed(const Waits& waits) {
  return std::all_of(
      waits.begin(), waits.end(), [](const auto& wait) { return wait.first->passed(wait.second); });
}

struct Heap {
  std::mutex mutex;
  std::map<void*, Block*> blocks;                                      // in use
  std::map<std::pair<Queue*, std::size_t>, std::vector<Block*>> free;  // by home and size
  std::vector<std::pair<Block*, Waits>> deferred;  // freed, but not reusable yet
};

Heap& heap() {
  static auto* const instance = new Heap;
  return *instance;
}

void poison(const Block& block) {
  std::memset(block.begin, kPoison, block.num_bytes);
}

// The caller of these functions must hold the heap's mutex.
void reuse(Heap& h, Block* block) {
  if (block->home == nullptr) {
    poison(*block);
  } else {
    auto& home = *block->home;
    const auto poisoned = home.push("poison", [block] { poison(*block); });
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
  h.free[{block->home, block->num_bytes}].push_back(block);
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
  h.blocks.erase(block->begin);
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
  auto& free = h.free[{home, rounded}];
  Block* block = nullptr;
  if (free.empty()) {
    block = new Block{std::aligned_alloc(kAlignment, rounded), rounded, home, {}, {}};
    poison(*block);
  } else {
    block = free.back();
    free.pop_back();
  }
  h.blocks[block->begin] = block;
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

// The block of one of these allocators that contains the memory, or null.
Block* block_at(Heap& h, const void* pointer) {
  auto next = h.blocks.upper_bound(const_cast<void*>(pointer));
  if (next == h.blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(next)->second;
  const auto* begin = static_cast<const char*>(block->begin);
  return pointer < begin + block->num_bytes ? block : nullptr;
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

void note_use(const c10::DataPtr& memory, Queue& queue, Position position) {
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
    if (block->home != nullptr && block->home->device() == device) {
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
