#include "failure.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace ddpx::shm {
namespace {

// kWriting lasts for microseconds, or forever if its writer is killed meanwhile.
enum State : uint32_t { kNone = 0, kWriting = 1, kWritten = 2 };

constexpr auto kMaxWriting = std::chrono::milliseconds(100);

}  // namespace

bool has_failed(const FailureRecord& record) noexcept {
  return record.state.load(std::memory_order_acquire) != kNone;
}

std::optional<Failure> read_failure(const FailureRecord& record) {
  if (!has_failed(record)) {
    return std::nullopt;
  }
  const auto deadline = std::chrono::steady_clock::now() + kMaxWriting;
  while (record.state.load(std::memory_order_acquire) != kWritten) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return Failure{
          ErrorKind::kPeerLost,
          "a local rank died while it reported a failure. See the output of the other ranks."};
    }
    std::this_thread::yield();
  }
  const auto length = strnlen(record.text, sizeof(record.text));
  const bool known = record.kind >= 0 && record.kind <= static_cast<int>(ErrorKind::kAborted);
  return Failure{
      known ? static_cast<ErrorKind>(record.kind) : ErrorKind::kSystem,
      std::string(record.text, length),
      std::max(record.culprit, -1)};
}

bool record_failure(
    FailureRecord& record, ErrorKind kind, std::string_view text, int culprit) noexcept {
  uint32_t expected = kNone;
  if (!record.state.compare_exchange_strong(expected, kWriting)) {
    return false;
  }
  record.kind = static_cast<int32_t>(kind);
  record.culprit = culprit;
  const auto length = std::min(text.size(), sizeof(record.text) - 1);
  std::memcpy(record.text, text.data(), length);
  record.state.store(kWritten, std::memory_order_release);
  return true;
}

Failure record_failure(FailureRecord& record, const Failure& failure) {
  return record_failure(record, failure.kind, failure.text, failure.culprit)
             ? failure
             : *read_failure(record);
}

}  // namespace ddpx::shm
