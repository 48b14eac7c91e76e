// A short text in memory that processes share.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "clock.h"

namespace ddpx::health {

// The length of the longest beginning of `text` with at most `most` bytes that ends between two
// characters.
inline std::size_t cut_utf8(const std::string& text, std::size_t most) {
  if (text.size() <= most) {
    return text.size();
  }
  const auto continues = [&text](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  while (most > 0 && continues(most)) {
    --most;
  }
  return most;
}

// A sequence lock: `version_` is odd while a thread writes. Any thread of any process may read and
// write. A reader that meets a writer tries again. Zeroed memory is an empty text.
template <std::size_t kBytes>
class SharedText {
 public:
  static constexpr std::size_t kMostBytes = kBytes;

  // A text that is too long is cut off between characters of UTF-8. If two threads write at the
  // same time, the second thread waits. If a writer has died, the next writer replaces its text.
  void write(const std::string& text) {
    const auto length = cut_utf8(text, kBytes);
    const auto writing = begin_write();
    std::atomic_thread_fence(std::memory_order_release);
    length_.store(static_cast<uint32_t>(length), std::memory_order_relaxed);
    for (std::size_t i = 0; i * 8 < length; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i * 8, std::min<std::size_t>(8, length - i * 8));
      words_[i].store(word, std::memory_order_relaxed);
    }
    version_.store(writing + 1, std::memory_order_release);
  }

  // Returns an empty text if a writer does not finish.
  std::string read() const {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const auto before = version_.load(std::memory_order_acquire);
      if (before % 2 != 0) {
        continue;
      }
      const auto length = std::min<std::size_t>(length_.load(std::memory_order_relaxed), kBytes);
      std::string text((length + 7) / 8 * 8, '\0');
      for (std::size_t i = 0; i * 8 < length; ++i) {
        const auto word = words_[i].load(std::memory_order_relaxed);
        std::memcpy(text.data() + i * 8, &word, 8);
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (version_.load(std::memory_order_relaxed) == before) {
        text.resize(length);
        return text;
      }
    }
    return {};
  }

  // The number of writes.
  uint32_t num_writes() const {
    return version_.load(std::memory_order_acquire) / 2;
  }

 private:
  static constexpr int kAttempts = 1000;

  uint32_t begin_write() {
    const auto deadline_ns = now_ns() + times::kWriteText;
    do {
      auto before = version_.load(std::memory_order_relaxed);
      if (before % 2 == 0 &&
          version_.compare_exchange_strong(before, before + 1, std::memory_order_acquire)) {
        return before + 1;
      }
      std::this_thread::yield();
    } while (now_ns() < deadline_ns);
    const auto writing = (version_.load(std::memory_order_relaxed) | 1) + 2;  // odd, and new
    version_.store(writing, std::memory_order_relaxed);
    return writing;
  }

  std::atomic<uint32_t> version_;
  std::atomic<uint32_t> length_;
  std::array<std::atomic<uint64_t>, (kBytes + 7) / 8> words_;
};

}  // namespace ddpx::health
