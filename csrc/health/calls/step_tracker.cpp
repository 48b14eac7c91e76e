#include "step_tracker.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace ddpx::health {
namespace {

// The number of words of a bucket in a sample. Each step samples other words. Up to kMostZeros
// zeros are skipped: the gradient of an embedding has few other words.
constexpr std::size_t kNumSamples = 4;
constexpr std::size_t kMostZeros = 64;

uint64_t mixed(uint64_t digest, uint64_t value) {
  digest ^= value + 0x9e3779b97f4a7c15 + (digest << 6) + (digest >> 2);
  return digest * 0xff51afd7ed558ccd;
}

}  // namespace

StepTracker::StepTracker(std::shared_ptr<Monitor> monitor, WrapperNames::Names names)
    : monitor_(std::move(monitor)), names_(std::move(names)) {
  if (monitor_) {
    set_number(kUnnumbered);
  }
}

void StepTracker::publish_thread() const {
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  if (monitor_ && monitor_->page().view().trains_in_thread == is_main) {
    monitor_->page().view().trains_in_thread = !is_main;
  }
}

void StepTracker::number_as_constructed() {
  if (monitor_) {
    set_number(monitor_->page().number_of_constructed());
  }
}

void StepTracker::set_number(uint32_t wrapper) {
  calls_.wrapper = wrapper;
  monitor_->check_process();
  monitor_->peers().names().set(model_of(wrapper), names_);
}

void StepTracker::name_buckets(std::vector<std::vector<std::string>> buckets) {
  names_.buckets = std::move(buckets);
  if (monitor_) {
    monitor_->peers().names().set(model_of(calls_.wrapper), names_);
  }
}

Activity StepTracker::activity(Doing doing, std::size_t bucket) const {
  constexpr std::size_t kMost = std::numeric_limits<uint16_t>::max();
  return {
      .doing = doing,
      .model = model_of(calls_.wrapper),
      .bucket = static_cast<uint16_t>(std::min(bucket, kMost)),
      .step = calls_.step};
}

void StepTracker::publish(Doing doing, std::size_t bucket) {
  if (monitor_) {
    monitor_->page().publish(activity(doing, is_about_a_bucket(doing) ? bucket : next_bucket_));
  }
}

Activity StepTracker::waiting_for_all() const {
  return activity(Doing::kWaiting, std::max<std::size_t>(next_bucket_, 1) - 1);
}

void StepTracker::publish_launch(std::size_t bucket, int64_t num_bytes, int dtype) {
  if (!monitor_) {
    return;
  }
  if (calls_.wrapper == kUnnumbered) {
    set_number(monitor_->page().next_number());
    publish_changed_frozen();
  }
  if (calls_.num_launched == 0) {
    const auto& group = monitor_->state().group;
    calls_.sequence = group.sequence();
    calls_.digest = group.same_sequence ? mixed(0, calls_.sequence) : 0;
  }
  const auto what = static_cast<uint64_t>(num_bytes) << 8 | static_cast<uint64_t>(dtype);
  calls_.digest = mixed(calls_.digest, what);
  calls_.num_bytes += static_cast<uint64_t>(num_bytes);
  ++calls_.num_launched;
  monitor_->page().view().calls.publish(calls_);
  next_bucket_ = std::max(next_bucket_, bucket + 1);
  publish(Doing::kBackward);
}

void StepTracker::add_result(const void* data, std::size_t num_bytes) {
  if (!monitor_ || !sample_ || num_bytes < sizeof(uint64_t)) {
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(data);
  const std::size_t num_words = (num_bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
  const auto shift = mixed(0, calls_.step) % num_words;
  for (std::size_t sample = 0; sample < kNumSamples; ++sample) {
    auto place = (shift + num_words * sample / kNumSamples) % num_words;
    uint64_t word = 0;
    for (std::size_t passed = 0; word == 0 && passed < kMostZeros; ++passed) {
      const auto offset = std::min(place * sizeof(word), num_bytes - sizeof(word));
      std::memcpy(&word, bytes + offset, sizeof(word));
      place = place + 1 == num_words ? 0 : place + 1;
    }
    sample_ = mixed(*sample_, word);
  }
}

void StepTracker::publish_frozen(const ParamIndices& params) {
  if (!monitor_) {
    return;
  }
  calls_.frozen = digest_of(params);
  frozen_.reset();
  if (calls_.frozen != published_frozen_) {
    frozen_ = params;
    publish_changed_frozen();
  }
}

// A wrapper without a number publishes when its first launch has given it a number.
void StepTracker::publish_changed_frozen() {
  if (frozen_ && calls_.wrapper != kUnnumbered) {
    published_frozen_ = calls_.frozen;
    monitor_->page().view().frozen.publish(calls_.wrapper, calls_.frozen, *frozen_);
    frozen_.reset();
  }
}

void StepTracker::break_off() {
  if (!monitor_) {
    return;
  }
  auto& page = monitor_->page().view();
  if (!sample_ && calls_.num_launched > 0) {
    calls_.results = StepCalls::kSpoiled;
    page.calls.publish(calls_);
  }
  const auto activity = page.activity();
  if (waits_for_peers(activity.doing)) {
    publish(Doing::kOutside);
  } else if (activity.doing == Doing::kHook) {
    publish(Doing::kBrokenHook, activity.bucket);
  }
}

StepCalls StepTracker::publish_results() {
  if (monitor_ && calls_.num_launched > 0) {
    const auto sample = sample_.value_or(StepCalls::kSpoiled);
    calls_.results = sample == 0 ? StepCalls::kNone : sample;
    monitor_->page().view().calls.publish(calls_);
    // Store, fence, load: of two ranks that arrive together, at least one reads the other's entry.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  return calls_;
}

}  // namespace ddpx::health
