// The end of a step: finish(), and match_peers() for a step that broke off.
#include <algorithm>
#include <utility>

#include "step.h"

namespace ddpx {

void Step::launch_rest() {
  if (launch_error_) {
    std::rethrow_exception(launch_error_);
  }
  if (std::exchange(rest_launched_, true)) {
    return;
  }
  for (const auto param_index : kind_ == Kind::kWithGrads ? unfinished() : Indices()) {
    context_.params.links().pull(param_index);
    mark_param_ready(param_index);
  }
  complete_order();
  if (context_.settings.manual_finalization && !agreements_launched_) {
    launch_agreements();  // of a rank without inputs, or without buckets
  }
}

bool Step::ready() const {
  return !launching_ && launches_.empty() && (context_.communicates() || unfinished().empty());
}

void Step::finish() {
  launch_rest();
  if (!agreements_launched_) {
    exchange_use();
  }
  finalize_all();
  const bool agrees = kind_ == Kind::kWithGrads && context_.communicates() &&
                      (context_.use_is_exchanged() || finite_check_);
  if (agrees) {
    context_.emit(StepEvent::kAgreeBegin);
  }
  if (!agreements_launched_) {
    for (const auto bucket_index : launch_mispredicted()) {
      finalize(bucket_index);
    }
  }
  write_back_params_of_peers();
  learn_use();
  check_finite();
  if (agrees) {
    context_.emit(StepEvent::kAgreeEnd);
  }
  if (kind_ == Kind::kWithGrads) {
    {
      const ExclusiveMutex::Unlocked unlocked(context_.mutex);
      context_.observer.peers().check_calls();
    }
    context_.emit(StepEvent::kCommEnd);
    context_.params.links().push_all();
    if (context_.options.lazy_buckets) {
      context_.buckets.free_memory();
    }
  }
}

void Step::finalize_all() {
  try {
    for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
      if (!predicted_unused(b)) {
        finalize(b);
      }
    }
  } catch (...) {
    // The result of a hook can be wrong on one rank alone. Peers then wait for nothing more.
    if (kind_ == Kind::kWithGrads && context_.settings.comm_hook && !finite_check_ &&
        !context_.observer.peers().group_failed()) {
      if (context_.options.mode == GraphMode::kStatic && context_.arrivals.learning()) {
        context_.arrivals.learn(arrivals_);
      }
      count_for_peers();
    }
    throw;
  }
}

void Step::finalize(std::size_t bucket_index) {
  auto& bucket = this->bucket(bucket_index);
  if (kind_ == Kind::kWithGrads) {
    context_.emit(StepEvent::kWaitBegin, bucket_index);
  } else {
    context_.observer.peers().note(health::Doing::kWaiting, bucket_index);
  }
  context_.communicate(
      [&] { bucket.wait(*context_.collective); },
      [&] { return context_.describe_bucket(bucket_index); });
  if (kind_ == Kind::kWithoutGrads) {
    return;
  }
  if (!context_.settings.comm_hook && !bucket.sparse() && bucket.device().is_cpu()) {
    context_.observer.peers().note_result(
        bucket.reduced().const_data_ptr(), bucket.reduced().nbytes());
  }
  context_.emit(StepEvent::kWaitEnd, bucket_index);
  // Params that this rank did not use come later: their used-map arrives behind all buckets.
  std::vector<const Slot*> slots;
  slots.reserve(bucket.slots().size());
  bool more_to_come = false;
  for (const auto& slot : bucket.slots()) {
    if (use_decides(slot)) {
      more_to_come = true;
    } else if (!excluded_[slot.param_index]) {
      slots.push_back(&slot);
    }
  }
  write_back(bucket, slots, context_.params.tensors(), place_in(bucket));
  if (!more_to_come) {
    bucket.release_reduced();
  }
  context_.emit(StepEvent::kWrittenBack, bucket_index);
}

// A param that no rank used keeps its gradient, but in default mode.
bool Step::use_decides(const Slot& slot) const {
  return context_.options.mode != GraphMode::kDefault && !excluded_[slot.param_index] &&
         !context_.use.map.marked(slot.param_index);
}

void Step::write_back_params_of_peers() {
  for (std::size_t b = 0; kind_ == Kind::kWithGrads && b < context_.buckets.size(); ++b) {
    auto& bucket = context_.buckets[b];
    if (!bucket.reduced().defined()) {
      continue;
    }
    std::vector<const Slot*> slots;
    for (const auto& slot : bucket.slots()) {
      if (use_decides(slot) && num_ranks_using()[slot.param_index] != 0) {
        slots.push_back(&slot);
      }
    }
    write_back(bucket, slots, context_.params.tensors(), place_in(bucket));
    bucket.release_reduced();
  }
}

void Step::report_late(std::size_t param_index) {
  report(
      errors::param_arrived_again(
          context_.where(),
          context_.params.name(param_index),
          param_index,
          context_.options.mode == GraphMode::kStatic,
          context_.options.gradient_as_bucket_view));
}

// ---- the use of params --------------------------------------------------------------------------

// The calls that follow the buckets. With manual finalization, ranks call finish() at different
// places between calls of the script, so each rank launches these calls directly after its last
// bucket. The rank waits only for the used-map, and only if a bucket was predicted to be unused.
void Step::launch_agreements() {
  agreements_launched_ = true;
  exchange_use();
  launch_mispredicted();
  if (finite_check_) {
    context_.communicate(
        [&] { finite_check_->launch(*context_.collective, context_.params.device()); },
        errors::finite_check);
  }
}

void Step::exchange_use() {
  if (!context_.use_is_exchanged()) {
    return;
  }
  auto& use = context_.use;
  context_.emit(StepEvent::kUseAgreement);
  for (const auto param_index : use.prediction.nested()) {
    use.map.mark_nested(param_index);
  }
  context_.communicate([&] { use.map.launch(*context_.collective); }, errors::used_map_exchange);
  use.last_sums = use.map.last_sums();
}

const std::vector<int32_t>& Step::num_ranks_using() {
  auto& use = context_.use;
  const auto& users = context_.communicate(
      [&]() -> const auto& { return use.map.num_ranks_using(); }, errors::used_map_exchange);
  if (!use.last_sums.of_ranks.is_same(use.map.last_sums().of_ranks)) {
    use.last_sums = use.map.last_sums();
  }
  return users;
}

// Launches the buckets that were predicted to be unused, but of which some rank used a param. The
// same on all ranks.
std::vector<std::size_t> Step::launch_mispredicted() {
  Indices mispredicted;
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    if (!predicted_unused(b)) {
      continue;
    }
    const auto& users = num_ranks_using();
    const auto& members = context_.buckets.plan().buckets()[b].param_indices;
    if (std::any_of(members.begin(), members.end(), [&](auto i) { return users[i] != 0; })) {
      mispredicted.push_back(b);
    }
  }
  for (const auto bucket_index : mispredicted) {
    pack_times_[bucket_index] = pack_time_if_used(bucket_index);
    if (kind_ == Kind::kWithGrads) {
      // Within a backward or after an abort, autograd has not made the current stream wait for the
      // gradients.
      context_.buckets[bucket_index].wait_for_streams();
      for (const auto param_index : context_.buckets.plan().buckets()[bucket_index].param_indices) {
        pack_param(param_index);
      }
      complete(bucket_index);
    }
    launch(bucket_index);
  }
  return mispredicted;
}

// The same on all ranks: either all ranks read the used-map, or some rank used every param, and the
// ranks that read the map find no unused param.
void Step::learn_use() {
  if (context_.options.mode != GraphMode::kFindUnused) {
    return;
  }
  auto& use = context_.use;
  if (context_.options.skip_unused_buckets && context_.communicates()) {
    for (std::size_t i = 0; i < use.unused_streaks.size(); ++i) {
      use.unused_streaks[i].learn(use.map.marked(i) || num_ranks_using()[i] != 0);
    }
  }
  if (const auto& nesting = use.map.num_ranks_nesting(); !nesting.empty()) {
    use.prediction.learn_from_ranks(num_ranks_using(), nesting);
  }
  use.map.clear();
  use.last_sums = use.map.last_sums();
}

void Step::check_finite() {
  if (!finite_check_) {
    return;
  }
  const auto findings = context_.communicate(
      [&] { return finite_check_->agree(*context_.collective, context_.params.device()); },
      errors::finite_check);
  std::vector<std::pair<int, std::string>> named;
  for (const auto& finding : findings) {
    named.emplace_back(finding.rank, context_.params.name(finding.param_index));
  }
  if (!named.empty()) {
    report(errors::gradients_not_finite(context_.where(), named));
  }
}

// ---- a step that broke off ----------------------------------------------------------------------

bool Step::match_peers() noexcept {
  try {
    if (context_.arrivals.learning() && !rest_launched_) {
      // On a device, the caller of backward may have changed the gradients by now.
      if (!context_.params.device().is_cpu() || !missing().empty()) {
        return false;
      }
      for (const auto param_index : unfinished()) {
        context_.params.links().pull(param_index);
        mark_param_ready(param_index);
      }
    }
    for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
      if (!predicted_unused(b) && !context_.buckets[b].in_flight()) {
        return false;  // peers wait for this bucket, and would pair it with another call
      }
    }
    complete_order();
    // This may run in the destructor of a graph task, so it waits only where peers launch further
    // buckets by the result. It does not wait for sums that peers only read.
    if (!agreements_launched_) {
      context_.use.map.abandon();
      launch_agreements();
    }
    if (context_.options.skip_unused_buckets) {
      learn_use();
    }
    count_for_peers();
    return true;
  } catch (...) {
    return false;  // the user gets the error that aborted this backward
  }
}

// The arrival order of the first step determines the rebuilt buckets. In a static graph, that of
// the second step does. All ranks count the same step, also ranks that take part without gradients.
void Step::complete_order() {
  if (context_.options.mode != GraphMode::kStatic || context_.use.static_use_known) {
    context_.order.complete(order_);
  }
}

// Peers finish the step, so this rank counts the step, too. After an abort a static graph goes on
// learning: gradients may lack parts.
void Step::count_for_peers() {
  context_.use.static_use_known = true;
  context_.observer.clock().skip_step();
  ++context_.num_steps;
}

}  // namespace ddpx
