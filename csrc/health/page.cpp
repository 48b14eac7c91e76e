#include "page.h"

#include <algorithm>
#include <limits>

namespace ddpx::health {
namespace {

uint16_t clamped(std::size_t value) {
  return static_cast<uint16_t>(std::min<std::size_t>(value, std::numeric_limits<uint16_t>::max()));
}

// Wrappers that take turns do not soon write over each other.
std::size_t place_of(uint8_t model, uint32_t step) {
  return (step + std::size_t{5} * model) % PageLayout::kNumSteps;
}

}  // namespace

Activity PageView::activity() const {
  return Activity::unpacked(
      layout().activity.load(std::memory_order_acquire),
      layout().since_ns.load(std::memory_order_relaxed));
}

Progress PageView::progress() const {
  return Progress::unpacked(layout().progress.load(std::memory_order_acquire));
}

Presence PageView::presence() const {
  const auto presence = layout().presence.load(std::memory_order_acquire);
  return presence <= static_cast<uint32_t>(Presence::kTerminated) ? static_cast<Presence>(presence)
                                                                  : Presence::kThere;
}

std::optional<StepCalls> PageView::calls(uint8_t model, uint32_t step) const {
  const auto& entry = layout().step_calls[place_of(model, step)];
  // Twice, so that an entry that is being written for another step is not taken for this one's.
  const auto before = entry.key.load(std::memory_order_acquire);
  const auto key = Progress::unpacked(before);
  const StepCalls calls{
      key.model,
      key.step,
      key.num_launched,
      entry.digest.load(std::memory_order_acquire),
      entry.sequence.load(std::memory_order_acquire),
      entry.results.load(std::memory_order_acquire),
      entry.num_bytes.load(std::memory_order_acquire),
      entry.wrapper.load(std::memory_order_acquire)};
  const auto after = entry.key.load(std::memory_order_acquire);
  const bool found = before == after && calls.model == model && calls.step == step;
  return found && calls.num_launched > 0 ? std::make_optional(calls) : std::nullopt;
}

OwnPage::OwnPage(uint64_t token, int world_size)
    : fd_(shm::create_memory(
          shm::round_up(PageLayout::num_bytes(world_size), shm::page_bytes()),
          "the status page of a rank")),
      view_(shm::map_shared(fd_.get())) {
  view_.layout().token.store(token, std::memory_order_relaxed);
  note(Doing::kOutside, StepCalls{kNoModel, 0, 0, 0, 0, 0}, 0);
}

void OwnPage::note(Doing doing, const StepCalls& calls, std::size_t bucket) {
  auto& layout = view_.layout();
  const Activity activity{doing, calls.model, clamped(bucket), calls.step, now_ns()};
  layout.since_ns.store(activity.since_ns, std::memory_order_relaxed);
  layout.activity.store(activity.packed(), std::memory_order_release);
  layout.progress.store(calls.progress(doing).packed(), std::memory_order_release);
}

void OwnPage::publish(const StepCalls& calls) {
  auto& layout = view_.layout();
  auto& entry = layout.step_calls[place_of(calls.model, calls.step)];
  const auto progress = calls.progress(Doing::kBackward).packed();
  entry.key.store(0, std::memory_order_release);
  entry.digest.store(calls.digest, std::memory_order_release);
  entry.sequence.store(calls.sequence, std::memory_order_release);
  entry.results.store(calls.results, std::memory_order_release);
  entry.num_bytes.store(calls.num_bytes, std::memory_order_release);
  entry.wrapper.store(calls.wrapper, std::memory_order_release);
  entry.key.store(progress, std::memory_order_release);
  layout.progress.store(progress, std::memory_order_release);
}

void OwnPage::leave() {
  auto there = static_cast<uint32_t>(Presence::kThere);
  view_.layout().presence.compare_exchange_strong(there, static_cast<uint32_t>(Presence::kLeft));
}

void OwnPage::mark_terminated() {
  auto there = static_cast<uint32_t>(Presence::kThere);
  view_.layout().presence.compare_exchange_strong(
      there, static_cast<uint32_t>(Presence::kTerminated));
}

void OwnPage::fail(const std::string& cause, std::optional<int> culprit) {
  if (view_.presence() == Presence::kFailing) {
    return;
  }
  auto& layout = view_.layout();
  layout.culprit_plus_1.store(culprit ? *culprit + 1 : 0, std::memory_order_relaxed);
  layout.cause.write(cause);
  layout.presence.store(static_cast<uint32_t>(Presence::kFailing), std::memory_order_release);
}

}  // namespace ddpx::health
