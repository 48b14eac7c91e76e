#include "step_guard.h"

#include <chrono>
#include <thread>
#include <utility>

#include "calls.h"

namespace ddpx::health {
namespace {

// For ranks that have not finished a step whose results differ. The next step compares slower
// ranks.
constexpr auto kTimeToComeThrough = std::chrono::milliseconds(1000);

}  // namespace

void StepGuard::compare_calls(const StepCalls& calls, const std::vector<std::string>& param_names) {
  if (!monitor_ || calls.num_launched == 0) {
    return;
  }
  compare(calls, /*is_over=*/false, param_names);
  const auto before = std::exchange(last_, calls);
  if (before.num_launched > 0 && before.step + 1 == calls.step) {
    compare(before, /*is_over=*/true, param_names);
  }
}

void StepGuard::compare(
    const StepCalls& calls, bool is_over, const std::vector<std::string>& param_names) const {
  const auto& peers = monitor_->peers();
  auto comparison = health::compare(peers, calls, is_over);
  const auto deadline = std::chrono::steady_clock::now() + kTimeToComeThrough;
  while (comparison == Comparison::kUndecided && std::chrono::steady_clock::now() < deadline) {
    monitor_->raise_if_failed();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    comparison = health::compare(peers, calls, is_over);
  }
  if (comparison == Comparison::kDifferent) {
    const auto frozen_by = [&](int rank) {
      const auto peer = rank == peers.rank() ? nullptr : peers.peer(rank);
      return (peer ? peer->page() : &monitor_->page().view())->frozen.to_text();
    };
    monitor_->raise_mismatch(mismatch_of(calls_by_rank(peers, calls), frozen_by, param_names));
  }
}

}  // namespace ddpx::health
