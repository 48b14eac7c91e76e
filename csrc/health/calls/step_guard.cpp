#include "step_guard.h"

#include <utility>

#include "../times.h"
#include "call_comparison.h"

namespace ddpx::health {

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
  if (comparison == Comparison::kUndecided) {
    poll_until(now_ns() + times::kStepEnd, times::kFlagPoll, [&] {
      monitor_->raise_if_failed();
      comparison = health::compare(peers, calls, is_over);
      return comparison != Comparison::kUndecided;
    });
  }
  if (comparison == Comparison::kDifferent) {
    const auto frozen_by = [&](int rank) {
      const auto peer = rank == peers.rank() ? nullptr : peers.peer(rank);
      return (peer ? peer->page() : &monitor_->page().view())->frozen.encode_all();
    };
    monitor_->raise_mismatch(mismatch_of(calls_by_rank(peers, calls), frozen_by, param_names));
  }
}

}  // namespace ddpx::health
