#include "step.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace ddpx {
namespace {

std::vector<std::size_t> frozen_params(const ReducerContext& context, Step::Kind kind) {
  std::vector<std::size_t> frozen;
  for (std::size_t i = 0; kind == Step::Kind::kWithGrads && i < context.params.size(); ++i) {
    if (!context.params.requires_grad(i)) {
      frozen.push_back(i);
    }
  }
  return frozen;
}

std::vector<std::size_t> unused_params(const ReducerContext& context, Step::Kind kind) {
  return kind == Step::Kind::kWithGrads && context.options.mode == GraphMode::kFindUnused
             ? context.use.prediction.unused()
             : std::vector<std::size_t>();
}

// A bucket of delayed params that holds the trigger itself waits for the trigger anyway.
std::vector<std::size_t> delayed_buckets(const ReducerContext& context) {
  std::vector<std::size_t> delayed;
  const auto trigger = context.options.delay_trigger;
  const auto& plan = context.buckets.plan();
  for (std::size_t b = 0; trigger && b < context.buckets.size(); ++b) {
    const auto first_param = plan.buckets()[b].param_indices.front();
    if (context.params.metas()[first_param].delayed && plan.location(*trigger).bucket_index != b) {
      delayed.push_back(b);
    }
  }
  return delayed;
}

int divisor_of(const ReducerContext& context) {
  const auto& settings = context.settings;
  return settings.comm_hook ? 1 : settings.divisor.value_or(context.collective->world_size());
}

}  // namespace

Step::Step(ReducerContext& context, Kind kind)
    : context_(context),
      kind_(kind),
      divisor_(divisor_of(context)),
      frozen_(frozen_params(context, kind)),
      arrivals_(context.arrivals, frozen_, unused_params(context, kind)),
      excluded_(context.params.size(), false),
      delayed_(delayed_buckets(context)),
      countdown_(context.buckets.plan(), delayed_),
      launches_(context.buckets.size()) {
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    const bool unused = context_.use.predicts_unused(context_.buckets.plan().buckets()[b]);
    pack_times_.push_back(unused ? PackTime::kIfMispredicted : pack_time_if_used(b));
  }
  if (context_.settings.check_finite) {
    finite_check_.emplace();
  }
  for (const auto& [param_index, rows] : context_.settings.sparse_rows) {
    if (context_.communicates()) {
      context_.buckets.of(param_index).set_rows(rows);
    }
  }
}

PackTime Step::pack_time_if_used(std::size_t bucket_index) const {
  return context_.options.batched_copy && !context_.buckets[bucket_index].sparse()
             ? PackTime::kWhenFull
             : PackTime::kOnArrival;
}

GradPlace Step::place_in(const Bucket& bucket) const {
  return context_.options.gradient_as_bucket_view && bucket.can_hold_grads()
             ? GradPlace::kInSlot
             : GradPlace::kOwnMemory;
}

Bucket& Step::bucket(std::size_t bucket_index) {
  return kind_ == Kind::kWithGrads ? context_.buckets[bucket_index] : zeros_.at(bucket_index);
}

void Step::report(UserError error) {
  context_.observer.peers().spoil_results();
  if (!error_) {
    error_ = std::move(error);
  }
}

// ---- gradients arrive ---------------------------------------------------------------------------

void Step::begin() {
  if (kind_ == Kind::kWithoutGrads) {
    for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
      if (!predicted_unused(b)) {
        launch(b);
      }
    }
    return;
  }
  for (const auto param_index : frozen_) {
    excluded_[param_index] = true;
    context_.cast_grad_to_averaged(param_index);
    if (context_.options.mode == GraphMode::kStatic && context_.use_is_exchanged()) {
      context_.use.map.mark(param_index);  // exchanged once for all steps: it may be thawed later
    }
  }
  for (const auto param_index : frozen_) {
    mark_param_ready(param_index);
  }
  for (const auto param_index : arrivals_.unused()) {
    mark_param_ready(param_index);
  }
  for (const auto param_index : context_.arrivals.known_unused()) {
    if (!excluded_[param_index]) {
      mark_param_ready(param_index);
    }
  }
}

void Step::arrive(std::size_t param_index) {
  context_.emit(StepEvent::kGradArrived, param_index);
  context_.mark_used(param_index);
  if (finite_check_) {
    finite_check_->record_arrival(param_index);
  }
  const bool order_counts = context_.order.wanted();
  switch (arrivals_.arrive(param_index)) {
    case Arrival::kFinal:
      if (order_counts) {
        order_.push_back(param_index);
      }
      if (!kept_.empty()) {
        kept_[param_index].reset();
      }
      mark_param_ready(param_index);
      break;
    case Arrival::kPartial:
      context_.add_stream_of(param_index);
      if (order_counts && context_.arrivals.learning() &&
          context_.options.mode != GraphMode::kStatic) {
        order_.push_back(param_index);
      }
      context_.cast_grad_to_local(param_index);
      keep(param_index, context_.params[param_index].grad());
      context_.params.links().push(param_index);
      break;
    case Arrival::kRepeated:
      report(
          errors::param_arrived_again(
              context_.where(),
              context_.params.name(param_index),
              context_.options.mode == GraphMode::kStatic,
              context_.options.gradient_as_bucket_view));
      break;
    case Arrival::kUnforeseen:
      report(errors::param_unforeseen(context_.where(), context_.params.name(param_index)));
      break;
    case Arrival::kFrozen:
      break;
  }
}

// A hook of the user may replace or clear `param.grad` before the gradient is packed.
void Step::keep(std::size_t param_index, at::Tensor grad) {
  if (context_.communicates()) {
    kept_.resize(context_.params.size());
    kept_[param_index] = std::move(grad);
  }
}

std::optional<at::Tensor> Step::take_kept(std::size_t param_index) {
  return kept_.empty() ? std::nullopt : std::exchange(kept_[param_index], std::nullopt);
}

void Step::mark_param_ready(std::size_t param_index) {
  if (!context_.communicates()) {
    context_.cast_grad_to_averaged(param_index);
    if (finite_check_ && !excluded_[param_index]) {
      finite_check_->check({param_index}, {context_.params[param_index].grad()});
    }
    return;
  }
  const auto bucket_index = context_.buckets.plan().location(param_index).bucket_index;
  if (!predicted_unused(bucket_index)) {
    pack_param(param_index);
  } else if (arrivals_.arrived(param_index) && (kept_.empty() || !kept_[param_index])) {
    keep(param_index, context_.params[param_index].grad());
  }
  count_down(bucket_index);
  if (context_.options.delay_trigger == param_index) {
    for (const auto delayed : delayed_) {
      count_down(delayed);
    }
  }
}

void Step::pack_param(std::size_t param_index) {
  auto& bucket = context_.buckets.of(param_index);
  const auto& slot = context_.buckets.slot_of(param_index);
  const auto& param = context_.params[param_index];
  const bool when_full = pack_times_[context_.buckets.plan().location(param_index).bucket_index] ==
                         PackTime::kWhenFull;
  const auto kept = take_kept(param_index);
  const auto& grad = kept ? *kept : param.grad();
  if (const auto misfit = find_misfit(bucket, slot, grad)) {
    // This rank sends zeros, so that peers do not wait. The error is raised at the end of the step.
    excluded_[param_index] = true;
    if (context_.params.requires_grad(param_index)) {
      report(
          errors::gradient_mismatch(
              context_.where(),
              context_.params.name(param_index),
              misfit->gradient,
              misfit->expected));
    }
    pack(bucket, slot, param, {}, divisor_, GradPlace::kMovedOut);
  } else if (excluded_[param_index]) {
    // A frozen gradient counts and stays unchanged. A batched bucket is divided as a whole.
    pack(bucket, slot, param, param.grad(), when_full ? 1 : divisor_, GradPlace::kMovedOut);
  } else if (when_full) {
    keep(param_index, grad);
  } else {
    pack(bucket, slot, param, grad, divisor_, place_in(bucket));
  }
}

void Step::count_down(std::size_t bucket_index) {
  bucket(bucket_index).add_stream();
  if (!countdown_.count_down(bucket_index)) {
    return;
  }
  context_.emit(StepEvent::kBucketReady, bucket_index);
  if (!predicted_unused(bucket_index)) {
    complete(bucket_index);
  }
  launches_.mark_ready(bucket_index);
  launch_ready();
}

// All gradients of the bucket are packed or kept.
void Step::complete(std::size_t bucket_index) {
  auto& bucket = context_.buckets[bucket_index];
  if (pack_times_[bucket_index] == PackTime::kWhenFull) {
    kept_.resize(context_.params.size());
    pack_all(bucket, context_.params.tensors(), kept_, excluded_, place_in(bucket));
    bucket.divide(divisor_);
    bucket.add_stream();  // another stream may launch the bucket
  }
  if (finite_check_) {
    bucket.wait_for_streams();
    Indices param_indices;
    std::vector<at::Tensor> grads;
    for (const auto& slot : bucket.slots()) {
      if (!excluded_[slot.param_index]) {
        param_indices.push_back(slot.param_index);
        grads.push_back(bucket.packed_slot(slot));
      }
    }
    finite_check_->check(param_indices, grads);
    bucket.add_stream();
  }
}

// One thread launches at a time, without the mutex. It also launches what other threads make ready
// meanwhile, so that buckets leave in plan order.
void Step::launch_ready() {
  if (launching_) {
    return;
  }
  launching_ = true;
  const auto stop = c10::make_scope_exit([this] {
    launching_ = false;
    context_.mutex.notify();
  });
  while (const auto bucket_index = launches_.pop()) {
    if (!predicted_unused(*bucket_index)) {
      launch(*bucket_index);
    }
  }
}

void Step::launch(std::size_t bucket_index) {
  if (kind_ == Kind::kWithoutGrads) {
    zeros_.emplace(
        bucket_index, context_.buckets[bucket_index].zeros_like(context_.params.tensors()));
  }
  auto& bucket = this->bucket(bucket_index);
  const auto& hook = context_.settings.comm_hook;
  context_.emit(StepEvent::kLaunched, bucket_index);
  context_.observer.peers().note_launch(
      bucket.num_bytes(), static_cast<int>(bucket.dtypes().summed));
  if (hook) {
    context_.emit(StepEvent::kHookBegin, bucket_index);
  }
  context_.communicate(
      [&] {
        if (hook) {
          bucket.launch(*hook, bucket_index, context_.buckets.size(), context_.params.tensors());
        } else {
          bucket.launch(*context_.collective);
        }
      },
      [&] { return context_.describe_bucket(bucket_index); });
  if (hook) {
    context_.emit(StepEvent::kHookEnd);
  }
  context_.observer.follow(bucket.reduction(), context_.step_number(), bucket_index);
}

// ---- the end of the step ------------------------------------------------------------------------

void Step::finish() {
  for (const auto param_index : kind_ == Kind::kWithGrads ? unfinished() : Indices()) {
    context_.params.links().pull(param_index);
    mark_param_ready(param_index);
  }
  if (kind_ == Kind::kWithoutGrads || !context_.arrivals.learning() ||
      context_.options.mode != GraphMode::kStatic) {
    context_.order.complete(order_);
  }
  exchange_use();
  finalize_all();
  const bool agrees = kind_ == Kind::kWithGrads && context_.communicates() &&
                      (context_.use_is_exchanged() || finite_check_);
  if (agrees) {
    context_.emit(StepEvent::kAgreeBegin);
  }
  reduce_mispredicted();
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
      count_for_peers();
    }
    throw;
  }
}

void Step::finalize(std::size_t bucket_index) {
  auto& bucket = this->bucket(bucket_index);
  context_.emit(StepEvent::kWaitBegin, bucket_index);
  context_.communicate(
      [&] { bucket.wait(*context_.collective); },
      [&] { return context_.describe_bucket(bucket_index); });
  if (kind_ == Kind::kWithoutGrads) {
    context_.emit(StepEvent::kWaitEnd, bucket_index);
    return;
  }
  const auto slots = slots_to_write(bucket);
  if (!context_.settings.comm_hook && !bucket.sparse() && bucket.device().is_cpu()) {
    context_.observer.peers().note_result(
        bucket.reduced().const_data_ptr(), static_cast<std::size_t>(bucket.num_bytes()));
  }
  context_.emit(StepEvent::kWaitEnd, bucket_index);  // includes the first read of the used-map
  write_back(bucket, slots, context_.params.tensors(), place_in(bucket));
  bucket.release_reduced();
  context_.emit(StepEvent::kWrittenBack, bucket_index);
}

// A param that no rank used keeps its gradient, but in default mode.
std::vector<const Slot*> Step::slots_to_write(const Bucket& bucket) {
  std::vector<const Slot*> slots;
  slots.reserve(bucket.slots().size());
  for (const auto& slot : bucket.slots()) {
    const auto param_index = slot.param_index;
    const bool keeps_grad = context_.options.mode != GraphMode::kDefault &&
                            !context_.use.map.marked(param_index) && !excluded_[param_index] &&
                            num_ranks_using()[param_index] == 0;
    if (!excluded_[param_index] && !keeps_grad) {
      slots.push_back(&slot);
    }
  }
  return slots;
}

// ---- the use of params --------------------------------------------------------------------------

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

// Buckets that were predicted to be unused, but of which some rank used a param. The same on all
// ranks.
void Step::reduce_mispredicted() {
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
    if (kind_ == Kind::kWithGrads) {
      pack_times_[bucket_index] = pack_time_if_used(bucket_index);
      for (const auto param_index : context_.buckets.plan().buckets()[bucket_index].param_indices) {
        pack_param(param_index);
      }
      complete(bucket_index);
    }
    launch(bucket_index);
  }
  for (const auto bucket_index : mispredicted) {
    finalize(bucket_index);
  }
}

// The same on all ranks: either all ranks read the used-map, or some rank used every param, and the
// ranks that read the map find no unused param.
void Step::learn_use() {
  if (context_.options.mode != GraphMode::kFindUnused) {
    return;
  }
  auto& use = context_.use;
  use.unused_by_all.clear();
  if (context_.options.skip_unused_buckets && context_.communicates() && !use.map.all_marked()) {
    const auto& users = num_ranks_using();
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (users[i] == 0) {
        use.unused_by_all.push_back(i);
      }
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
    if (context_.arrivals.learning() && missing().empty()) {
      context_.buckets.wait_for_streams();
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
    if (!context_.arrivals.learning() || context_.options.mode != GraphMode::kStatic) {
      context_.order.complete(order_);
    }
    // Nothing is waited for, because this may run in the destructor of a graph task. Peers wait
    // only to read the sums.
    context_.use.map.abandon();
    exchange_use();
    if (context_.options.skip_unused_buckets) {
      reduce_mispredicted();
      learn_use();
    }
    if (finite_check_) {
      finite_check_->launch(*context_.collective, context_.params.device());
    }
    count_for_peers();
    return true;
  } catch (...) {
    return false;  // the user gets the error that aborted this backward
  }
}

// Peers finish the step, so this rank counts the step, too.
void Step::count_for_peers() {
  if (context_.options.mode == GraphMode::kStatic && context_.arrivals.learning()) {
    context_.arrivals.learn(arrivals_);  // all ranks learn in the same step
  }
  context_.use.static_use_known = true;
  context_.observer.clock().skip_step();
  ++context_.num_steps;
}

}  // namespace ddpx
