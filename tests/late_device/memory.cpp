#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "streams.h"

namespace late {
namespace {

constexpr int kPoison = 0xFF;  // all bits set: NaN in every floating-point type
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kQuarantineBytes = std::size_t{64} << 20;

thread_local c10::DeviceIndex device_index = 0;

struct Block {
  void* data;
  std::size_t num_bytes;
  bool pinned;
  std::vector<c10::Stream> streams;  // that use it; of device memory its own comes first
};

// Every block in use, by address. Freed ones are kept for a while, so that a late reader finds
// poison and not another block.
class Blocks {
 public:
  void add(Block block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_[block.data] = std::move(block);
  }

  Block take(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto block = std::move(in_use_.at(data));
    in_use_.erase(data);
    return block;
  }

  void record(const void* data, const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto* block = find(data)) {
      auto& streams = block->streams;
      if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
        streams.push_back(stream);
      }
    }
  }

  bool is_pinned(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* block = find(data);
    return block != nullptr && block->pinned;
  }

  void retire(const Block& block) {
    if (!block.pinned) {
      std::memset(block.data, kPoison, block.num_bytes);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    quarantine_.push_back(block);
    num_quarantined_ += block.num_bytes;
    while (num_quarantined_ > kQuarantineBytes) {
      num_quarantined_ -= quarantine_.front().num_bytes;
      std::free(quarantine_.front().data);
      quarantine_.pop_front();
    }
  }

 private:
  Block* find(const void* data) {
    auto next = in_use_.upper_bound(const_cast<void*>(data));
    if (next == in_use_.begin()) {
      return nullptr;
    }
    auto& block = std::prev(next)->second;
    const auto* begin = static_cast<const char*>(block.data);
    return static_cast<const char*>(data) < begin + block.num_bytes ? &block : nullptr;
  }

  std::mutex mutex_;
  std::map<void*, Block> in_use_;
  std::deque<Block> quarantine_;
  std::size_t num_quarantined_ = 0;
};

Blocks& blocks() {
  static auto* all = new Blocks();
  return *all;
}

// Behind the present tasks of every stream that uses the block.
void free_block(void* data) {
  auto block = std::make_shared<Block>(blocks().take(data));
  if (block->streams.empty()) {
    blocks().retire(*block);
    return;
  }
  auto num_left = std::make_shared<std::atomic<std::size_t>>(block->streams.size());
  for (const auto& stream : block->streams) {
    queue_of(stream).submit(TaskQueue::Kind::kSignal, [block, num_left] {
      if (--*num_left == 0) {
        blocks().retire(*block);
      }
    });
  }
}

class LateAllocator final : public c10::Allocator {
 public:
  explicit LateAllocator(bool pinned) : pinned_(pinned) {}

  c10::DataPtr allocate(std::size_t num_bytes) override {
    const auto device =
        pinned_ ? c10::Device(c10::kCPU) : c10::Device(c10::kPrivateUse1, device_index);
    if (num_bytes == 0) {
      return {nullptr, device};
    }
    const auto rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    TORCH_CHECK(data != nullptr, "the late device is out of memory");
    std::memset(data, kPoison, num_bytes);
    Block block{data, num_bytes, pinned_, {}};
    if (!pinned_) {
      block.streams.push_back(current_stream(device_index));
    }
    blocks().add(std::move(block));
    return {data, data, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    synchronize(device_index);
    std::memcpy(dest, src, count);
  }

 private:
  bool pinned_;
};

}  // namespace

c10::Allocator& device_memory() {
  static auto* allocator = new LateAllocator(/*pinned=*/false);
  return *allocator;
}

c10::Allocator& pinned_memory() {
  static auto* allocator = new LateAllocator(/*pinned=*/true);
  return *allocator;
}

bool is_pinned(const void* data) {
  return blocks().is_pinned(data);
}

void record_use(const void* data, const c10::Stream& stream) {
  blocks().record(data, stream);
}

c10::DeviceIndex current_device() {
  return device_index;
}

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kNumDevices, "there is no device late:", int(device));
  device_index = device;
}

}  // namespace late
