#include "recent_steps.h"

#include <bit>

#include "activity.h"

namespace ddpx::health {
namespace {

using Words = std::array<uint64_t, sizeof(StepCalls) / sizeof(uint64_t)>;

bool is_reduced(const StepCalls& calls) {
  return calls.results != 0 && calls.results != StepCalls::kSpoiled;
}

}  // namespace

// Wrappers that run in turn have different places, and reach a level in different steps: 157 is
// 0.61 of 256.
std::size_t RecentSteps::place_of(uint8_t model, uint32_t step) {
  std::size_t turn = std::size_t{step} + std::size_t{157} * model;
  std::size_t level = 0;
  for (; level + 1 < kNumLevels && turn % kFactor == 0; ++level) {
    turn /= kFactor;
  }
  return level * kFactor + turn % kFactor;
}

void RecentSteps::publish(const StepCalls& calls) {
  auto& entry = entries_[place_of(model_of(calls.wrapper), calls.step)];
  const auto words = std::bit_cast<Words>(calls);
  auto version = entry.version.load(std::memory_order_relaxed);
  if (version % 2 != 0 ||
      !entry.version.compare_exchange_strong(version, version + 1, std::memory_order_acquire)) {
    return;
  }
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < words.size(); ++i) {
    entry.words[i].store(words[i], std::memory_order_relaxed);
  }
  entry.version.store(version + 2, std::memory_order_release);
}

// Each step calls this function and the next two for each rank of the host. They construct the
// result in place: a copy directly after the writes of single words would stall.
std::optional<StepCalls> RecentSteps::Entry::read() const {
  const auto word = [this](std::size_t index) {
    return words[index].load(std::memory_order_relaxed);
  };
  const auto before = version.load(std::memory_order_acquire);
  const auto numbers = std::bit_cast<std::array<uint32_t, 2>>(word(0));
  std::optional<StepCalls> calls(
      StepCalls{
          numbers[0], numbers[1], word(1), word(2), word(3), word(4), word(5), word(6), word(7)});
  std::atomic_thread_fence(std::memory_order_acquire);
  if (before % 2 != 0 || version.load(std::memory_order_relaxed) != before) {
    calls.reset();
  }
  return calls;
}

std::optional<StepCalls> RecentSteps::find(uint8_t model, uint32_t step) const {
  auto found = entries_[place_of(model, step)].read();
  if (found &&
      (found->step != step || model_of(found->wrapper) != model || found->num_launched == 0)) {
    found.reset();
  }
  return found;
}

std::optional<StepCalls> RecentSteps::find(const StepCalls& other) const {
  auto found = find(model_of(other.wrapper), other.step);
  if (found && found->wrapper != other.wrapper) {
    found.reset();
  }
  return found;
}

std::vector<StepCalls> RecentSteps::reduced() const {
  std::vector<StepCalls> steps;
  for (const auto& entry : entries_) {
    if (const auto calls = entry.read(); calls && is_reduced(*calls)) {
      steps.push_back(*calls);
    }
  }
  return steps;
}

std::optional<std::pair<StepCalls, StepCalls>> RecentSteps::find_mismatch(
    const std::vector<StepCalls>& theirs) const {
  std::optional<std::pair<StepCalls, StepCalls>> found;
  for (const auto& other : theirs) {
    const auto own = find(other);
    const bool differs =
        own && is_reduced(*own) &&
        !(own->same_launches(other) && own->same_frozen(other) && own->same_results(other));
    if (differs && (!found || own->step < found->first.step)) {
      found = {*own, other};
    }
  }
  return found;
}

}  // namespace ddpx::health
