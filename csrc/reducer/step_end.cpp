// The end of a step: finish(), and match_peers() for a step that broke off.
#include <algorithm>
#include <string>
#include <utility>

#include "../buckets/param_grad.h"
#include "step.h"

namespace ddpx {

void Step::launch_rest() {
  launches_.rethrow_error();
  if (std::exchange(rest_launched_, true)) {
    return;
  }
  for (const auto param_index : unfinished()) {
    context_.params.links().pull(param_index);
    mark_param_ready(param_index);
  }
  context_.history.complete_order(context_.options.mode, order_);
  if (context_.settings.manual_finalization && !agreements_launched_) {
    launch_agreements();  // of a rank without buckets
  }
}

bool Step::ready() const {
  return launches_.ended() && (context_.communicates() || unfinished().empty());
}

// A rank without communication keeps its gradients, with the changes of the script.
void Step::hold_grads() {
  if (context_.communicates()) {
    const auto& leaves = context_.params.leaves();
    held_.grads.record(leaves);
    if (!context_.settings.comm_hook) {  // a hook may run an optimizer
      held_.param_versions.resize(leaves.size());
      std::transform(leaves.begin(), leaves.end(), held_.param_versions.begin(), version_of);
    }
  }
}

// The averages are written over what the script did to the gradients.
void Step::report_changed_grads() {
  const auto names = context_.params.names_of(held_.grads.pop_changed(context_.params.leaves()));
  if (names.empty()) {
    return;
  }
  const auto count = names.size();
  const std::string consequence =
      context_.options.gradient_as_bucket_view
          ? "With gradient_as_bucket_view=True, the change may have met the all-reduce of the "
            "bucket, and ranks may have received different averages. Restart all ranks from a "
            "checkpoint. "
          : "param.grad now has the averages without this change. ";
  report(context_.error(
      "the script changed " + errors::by_number(count, "the gradient of ", "the gradients of ") +
      errors::count_params(count) +
      " between backward() and finalize_backward(): " + join_names(names) + ". " + consequence +
      "Change gradients only after finalize_backward(). A schedule of "
      "torch.distributed.pipelining divides gradients by the number of micro-batches: pass "
      "scale_grads=False to the schedule, and divide after finalize_backward()."));
}

// Ranks have applied different gradients.
void Step::report_early_updates() {
  auto changed = context_.script_grads.early_updates.pop_changed();
  for (std::size_t i = 0; i < held_.param_versions.size(); ++i) {
    if (version_of(context_.params.leaves()[i]) != held_.param_versions[i]) {
      changed.push_back(i);
    }
  }
  if (changed.empty()) {
    return;
  }
  std::sort(changed.begin(), changed.end());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
  report(context_.error(
      "the script changed " + errors::count_params(changed.size()) +
      " before the gradients were averaged: " + join_names(context_.params.names_of(changed)) +
      ". An optimizer in a hook of register_post_accumulate_grad_hook(), or before "
      "finalize_backward(), applies the gradients of this rank alone, so ranks may now have "
      "different parameters. Restart all ranks from a checkpoint. Run the optimizer after the "
      "gradients are averaged: after backward() or finalize_backward(), or in a hook of "
      "model.register_post_sync_hook(). If hooks average the gradients themselves, run this "
      "backward in model.no_sync()."));
}

void Step::finish() {
  launch_rest();
  report_early_updates();
  report_changed_grads();
  if (!agreements_launched_) {
    collectives_.exchange_use();
  }
  finalize_all();
  const bool agrees = context_.communicates() &&
                      (context_.use_is_exchanged() || collectives_.finite_check() != nullptr);
  if (agrees) {
    context_.emit(StepEvent::kAgreeBegin);
  }
  if (!agreements_launched_) {
    for (const auto bucket_index : launch_mispredicted()) {
      finalize(bucket_index);
    }
  }
  write_back_params_of_peers();
  collectives_.learn_use();
  if (auto error = collectives_.finite_error()) {
    report(std::move(*error));
  }
  if (auto error = collectives_.weight_error()) {
    report(std::move(*error));
  }
  if (agrees) {
    context_.emit(StepEvent::kAgreeEnd);
  }
  compare_calls();
  context_.emit(StepEvent::kCommEnd);
  context_.params.links().push_all();
  if (context_.options.lazy_buckets) {
    context_.buckets.free_memory();
  }
}

// Raises if peers made other calls.
void Step::compare_calls() {
  if (context_.guard.has_lease()) {
    const ExclusiveMutex::Unlocked unlocked(context_.mutex);
    context_.guard.await_lease();  // a step that began before the host was cut off must not end
  }
  const auto calls = context_.observer.peers().publish_results();
  const ExclusiveMutex::Unlocked unlocked(context_.mutex);
  context_.guard.compare_calls(calls, context_.params.names());
}

void Step::finalize_all() {
  try {
    for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
      if (!collectives_.predicted_unused(b)) {
        finalize(b);
      }
    }
  } catch (...) {
    // The result of a hook can be wrong on one rank alone. Peers then wait for nothing more.
    if (context_.settings.comm_hook && collectives_.finite_check() == nullptr &&
        !context_.guard.failed()) {
      if (context_.options.mode == GraphMode::kStatic && context_.history.arrivals.learning()) {
        context_.history.arrivals.learn(arrivals_);
      }
      context_.skip_step();
    }
    throw;
  }
}

void Step::finalize(std::size_t bucket_index) {
  auto& bucket = context_.buckets[bucket_index];
  context_.emit(StepEvent::kWaitBegin, bucket_index);
  collectives_.wait(bucket_index, bucket);
  if (!context_.settings.comm_hook && !bucket.sparse() && bucket.device().is_cpu()) {
    context_.observer.peers().add_result(
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
    } else if (!params_[slot.param_index].excluded) {
      slots.push_back(&slot);
    }
  }
  write_back(bucket, slots);
  if (!more_to_come) {
    bucket.release_reduced();
  }
  context_.emit(StepEvent::kWrittenBack, bucket_index);
}

// Except in default mode after a forward, a param that no rank used keeps its gradient.
bool Step::use_decides(const Slot& slot) const {
  const bool may_be_unused = context_.use_varies() || context_.options.mode == GraphMode::kStatic;
  return may_be_unused && !params_[slot.param_index].excluded &&
         !context_.history.use.map.marked(slot.param_index);
}

void Step::write_back_params_of_peers() {
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    auto& bucket = context_.buckets[b];
    if (!bucket.reduced().defined()) {
      continue;
    }
    std::vector<const Slot*> slots;
    for (const auto& slot : bucket.slots()) {
      if (use_decides(slot) && collectives_.num_ranks_using()[slot.param_index] != 0) {
        slots.push_back(&slot);
      }
    }
    write_back(bucket, slots);
    bucket.release_reduced();
  }
}

void Step::write_back(const Bucket& bucket, const std::vector<const Slot*>& slots) {
  ddpx::write_back(bucket, slots, context_.params.tensors(), place_in(bucket));
  auto& taken_grads = context_.script_grads.taken;
  for (std::size_t i = 0; !taken_grads.empty() && i < slots.size(); ++i) {
    const auto param_index = slots[i]->param_index;
    taken_grads.record_average(param_index, context_.params.leaves()[param_index]);
  }
}

void Step::report_late(std::size_t param_index) {
  const std::string remedy =
      context_.options.mode == GraphMode::kStatic
          ? "Your training graph has changed in this iteration: this parameter got fewer gradients "
            "in the first synchronized backward with static_graph=True. Remove static_graph=True, "
            "or keep the graph the same in every step."
          : "This happens when one layer is used in several reentrant checkpoints. Use "
            "checkpoint(..., use_reentrant=False), or pass static_graph=True. This also happens "
            "when several threads run backwards through one wrapper at the same time. Run one "
            "backward at a time.";
  const std::string consequence =
      context_.options.gradient_as_bucket_view
          ? " With gradient_as_bucket_view=True, this gradient was added to a bucket whose "
            "all-reduce may have been running. Ranks may have received different averages. Restart "
            "all ranks from a checkpoint."
          : "";
  const auto& name = context_.params.name(param_index);
  report(context_.error(
      "parameter '" + name +
      "' got another gradient after its gradient had been packed for all-reduce. " + remedy +
      consequence +
      " In DDP's words: Expected to mark a variable ready only once. Parameter at index " +
      std::to_string(param_index) + " with name " + name + " has been marked as ready twice."));
}

// ---- the use of params --------------------------------------------------------------------------

// The calls that follow the buckets. With manual finalization, ranks call finish() at different
// places between calls of the script, so each rank launches these calls directly after its last
// bucket. The rank waits only for the used-map, and only if a bucket was predicted to be unused.
void Step::launch_agreements() {
  agreements_launched_ = true;
  collectives_.exchange_use();
  launch_mispredicted();
  collectives_.launch_finite_check();
}

// Launches the buckets that were predicted to be unused, but of which some rank used a param. The
// same on all ranks.
Step::Indices Step::launch_mispredicted() {
  auto mispredicted = collectives_.take_mispredicted();
  for (const auto bucket_index : mispredicted) {
    auto& bucket = context_.buckets[bucket_index];
    // Within a backward or after an abort, autograd has not made the current stream wait for the
    // gradients.
    bucket.wait_for_streams();
    for (const auto param_index : context_.buckets.plan().buckets()[bucket_index].param_indices) {
      pack_param(param_index);
    }
    complete(bucket_index);
    collectives_.launch(bucket_index, bucket);
  }
  return mispredicted;
}

// ---- a step that broke off ----------------------------------------------------------------------

bool Step::match_peers() noexcept {
  try {
    grads_may_change_ = !context_.params.device().is_cpu();
    if (context_.history.arrivals.learning() && !rest_launched_) {
      if (grads_may_change_ || !missing().empty()) {
        return false;
      }
      for (const auto param_index : unfinished()) {
        context_.params.links().pull(param_index);
        mark_param_ready(param_index);
      }
    }
    for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
      if (!collectives_.predicted_unused(b) && !context_.buckets[b].in_flight()) {
        return false;  // peers wait for this bucket, and would pair it with another call
      }
    }
    context_.history.complete_order(context_.options.mode, order_);
    // This may run in the destructor of a graph task, so it waits only where peers launch further
    // buckets by the result. It does not wait for sums that peers only read.
    if (!agreements_launched_) {
      context_.history.use.map.abandon();
      launch_agreements();
    }
    if (context_.options.skip_unused_buckets) {
      collectives_.learn_use();
    }
    context_.skip_step();
    return true;
  } catch (...) {
    return false;  // the user gets the error that aborted this backward
  }
}

}  // namespace ddpx
