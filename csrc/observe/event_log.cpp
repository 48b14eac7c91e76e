#include "event_log.h"

#include <chrono>
#include <string>

#include "../errors.h"

namespace ddpx {
namespace {

constexpr std::size_t kMostEvents = std::size_t{1} << 24;  // half a GiB

std::size_t power_of_two_from(std::size_t least) {
  if (least > kMostEvents) {
    throw UserError(
        "a recording of " + std::to_string(least) +
        " events was requested, but a recording holds at most " + std::to_string(kMostEvents) +
        " events. Request fewer events.");
  }
  std::size_t power = 1;
  while (power < least) {
    power *= 2;
  }
  return power;
}

}  // namespace

int64_t steady_now() {
  const auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count();
}

EventLog::EventLog(std::size_t capacity)
    : mask_(power_of_two_from(capacity) - 1), slots_(new Slot[mask_ + 1]) {}

void EventLog::add_at(int64_t time_ns, EventKind kind, uint32_t step, std::size_t index) {
  const auto position = next_.fetch_add(1, std::memory_order_relaxed);
  const auto sequence = (position + 1) << 8 | static_cast<uint8_t>(kind);
  auto& slot = slots_[position & mask_];
  auto before = slot.sequence.load(std::memory_order_relaxed);
  if (before == Slot::kWriting || before > sequence ||
      !slot.sequence.compare_exchange_strong(before, Slot::kWriting, std::memory_order_acquire)) {
    return;
  }
  std::atomic_thread_fence(std::memory_order_release);
  slot.time_ns.store(time_ns, std::memory_order_relaxed);
  slot.what.store(
      static_cast<uint64_t>(step) << 32 | static_cast<uint32_t>(index), std::memory_order_relaxed);
  slot.sequence.store(sequence, std::memory_order_release);
}

std::vector<Event> EventLog::read() const {
  std::vector<Event> events;
  const auto end = next_.load(std::memory_order_acquire);
  const auto begin = end > capacity() ? end - capacity() : 0;
  events.reserve(end - begin);
  for (auto position = begin; position < end; ++position) {
    const auto& slot = slots_[position & mask_];
    const auto sequence = slot.sequence.load(std::memory_order_acquire);
    const auto time_ns = slot.time_ns.load(std::memory_order_relaxed);
    const auto what = slot.what.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (sequence >> 8 == position + 1 &&
        slot.sequence.load(std::memory_order_relaxed) == sequence) {
      events.push_back(
          {time_ns,
           static_cast<uint32_t>(what >> 32),
           static_cast<int32_t>(what & 0xffffffff),
           static_cast<EventKind>(sequence & 0xff)});
    }
  }
  return events;
}

}  // namespace ddpx
