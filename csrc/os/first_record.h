// The first of several records that processes write into memory that they share.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace ddpx::os {

// Zeroed memory has no record. Thread-safe. The functions allocate nothing.
//
// A writer takes a draft that no other writer has, fills it, and declares it by compare-and-swap.
// No process reads a draft before it is declared. So a writer that is stopped, or dies while it
// writes, changes nothing.
template <class Record>
class FirstRecord {
 public:
  // Lets `write` fill a record, unless there is a record. Waits while other writers write, for half
  // a second at most. Returns whether the record is the first. If get() is still null afterwards,
  // all other writers are stopped, or have died.
  template <class Write>
  bool declare(const Write& write) {
    for (uint32_t number = 0; number < drafts_.size(); ++number) {
      auto& draft = drafts_[number];
      if (!draft.is_taken.exchange(true)) {
        write(draft.record);
        uint32_t none = 0;
        return declared_plus_1_.compare_exchange_strong(none, number + 1);
      }
      const auto deadline = std::chrono::steady_clock::now() + kTimeToWrite;
      while (get() == nullptr && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (get() != nullptr) {
        return false;
      }
    }
    return false;
  }

  // Null if there is no record. One atomic load.
  const Record* get() const {
    const auto number_plus_1 = declared_plus_1_.load(std::memory_order_acquire);
    return number_plus_1 == 0 ? nullptr : &drafts_[(number_plus_1 - 1) % kNumDrafts].record;
  }

 private:
  static constexpr uint32_t kNumDrafts = 4;
  static constexpr std::chrono::milliseconds kTimeToWrite{100};
  static_assert(kNumDrafts * kTimeToWrite < std::chrono::milliseconds(500));

  struct Draft {
    std::atomic<bool> is_taken;
    Record record;
  };

  std::atomic<uint32_t> declared_plus_1_;
  std::array<Draft, kNumDrafts> drafts_;
};

}  // namespace ddpx::os
