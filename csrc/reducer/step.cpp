#include "step.h"

#include <algorithm>
#include <utility>

#include "../buckets/param_grad.h"

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
  // With find_unused, ranks agree on the use of each param, so a frozen param is a param that this
  // rank does not use: if another rank used it, every rank gets the average. In the other modes all
  // ranks must freeze the same params.
  if (context_.options.mode != GraphMode::kFindUnused) {
    exclude_frozen();
  } else {
    unmark_dropped();
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

void Step::exclude_frozen() {
  for (const auto param_index : frozen_) {
    excluded_[param_index] = true;
    context_.cast_grad_to_averaged(param_index);
    if (context_.options.mode == GraphMode::kStatic && context_.use_is_exchanged()) {
      context_.use.map.mark(param_index);  // exchanged once for all steps: it may be thawed later
    }
  }
  context_.observer.peers().note_frozen(frozen_);
}

// A local backward marked the param. Then the script froze the param and dropped the gradient.
void Step::unmark_dropped() {
  for (const auto param_index : frozen_) {
    if (!grad_of(context_.params[param_index]).defined()) {
      context_.use.map.unmark(param_index);
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
          (context_.options.mode != GraphMode::kStatic || context_.use.static_use_known)) {
        order_.push_back(param_index);
      }
      context_.cast_grad_to_local(param_index);
      if (context_.arrivals.learning()) {
        move_into_bucket(param_index);
      }
      keep(param_index, grad_of(context_.params[param_index]));
      context_.params.links().push(param_index);
      break;
    case Arrival::kRepeated:
      report_late(param_index);
      break;
    case Arrival::kUnforeseen:
      report(errors::param_unforeseen(context_.where(), context_.params.name(param_index)));
      break;
    case Arrival::kFrozen:
      break;
  }
}

// In the first step all gradients are kept until backward ends. With views they are moved,
// undivided, so that gradients and buckets do not take up memory at the same time.
void Step::move_into_bucket(std::size_t param_index) {
  if (!context_.communicates()) {
    return;
  }
  auto& bucket = context_.buckets.of(param_index);
  const auto& slot = context_.buckets.slot_of(param_index);
  const auto& param = context_.params[param_index];
  if (context_.options.lazy_buckets && place_in(bucket) == GradPlace::kInSlot) {
    if (context_.options.mode == GraphMode::kStatic) {
      return;  // moved together at the end, as in DDP
    }
    ensure_memory(bucket);
  }
  if (place_in(bucket) == GradPlace::kInSlot && grad_of(param).defined() &&
      grad_of(param).scalar_type() == bucket.dtypes().summed &&
      move_into_slot(bucket, slot, param)) {
    moved_.resize(context_.params.size());
    moved_[param_index] = true;
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
      finite_check_->check({param_index}, {grad_of(context_.params[param_index])});
    }
    return;
  }
  const auto bucket_index = context_.buckets.plan().location(param_index).bucket_index;
  if (!predicted_unused(bucket_index)) {
    pack_param(param_index);
  } else if (arrivals_.arrived(param_index) && (kept_.empty() || !kept_[param_index])) {
    keep(param_index, grad_of(context_.params[param_index]));
  }
  count_down(bucket_index);
  if (context_.options.delay_trigger == param_index) {
    for (const auto delayed : delayed_) {
      count_down(delayed);
    }
  }
}

// Allocates the memory of a lazy bucket. With views, present gradients of all its params move
// there, as in DDP: the gradient that has just arrived, and gradients of earlier backwards.
void Step::ensure_memory(Bucket& bucket) {
  const auto& params = context_.params.tensors();
  if (!bucket.ensure_memory(*context_.collective, params) ||
      place_in(bucket) != GradPlace::kInSlot) {
    return;
  }
  bucket.wait_for_streams();
  bucket.add_stream();
  for (const auto& slot : bucket.slots()) {
    const auto param_index = slot.param_index;
    const auto& param = params[param_index];
    const bool is_kept =
        !kept_.empty() && kept_[param_index] && kept_[param_index]->is_same(grad_of(param));
    if (!excluded_[param_index] && move_into_slot(bucket, slot, param) && is_kept) {
      kept_[param_index] = grad_of(param);
    }
  }
}

void Step::pack_param(std::size_t param_index) {
  auto& bucket = context_.buckets.of(param_index);
  if (context_.options.lazy_buckets) {
    ensure_memory(bucket);
  }
  const auto& slot = context_.buckets.slot_of(param_index);
  const auto& param = context_.params[param_index];
  const bool when_full = pack_times_[context_.buckets.plan().location(param_index).bucket_index] ==
                         PackTime::kWhenFull;
  const auto kept = take_kept(param_index);
  const auto& grad = kept ? *kept : grad_of(param);
  if (const auto misfit = find_misfit(bucket, slot, grad)) {
    // This rank sends zeros, so that peers do not wait. The error is raised at the end of the step.
    const bool keeps_its_grad = excluded_[param_index];  // frozen, so the gradient is of no use
    excluded_[param_index] = true;
    if (!keeps_its_grad) {
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
    pack(bucket, slot, param, grad_of(param), when_full ? 1 : divisor_, GradPlace::kMovedOut);
  } else if (when_full) {
    keep(param_index, grad);
  } else {
    const bool moved = !moved_.empty() && moved_[param_index];
    pack(bucket, slot, param, grad, divisor_, moved ? GradPlace::kMovedIn : place_in(bucket));
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
    if (context_.options.lazy_buckets) {
      ensure_memory(bucket);
    }
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
// meanwhile, so that buckets are launched in plan order. After a launch that failed no thread
// launches: peers would pair the next bucket with the one that failed here.
void Step::launch_ready() {
  if (launching_) {
    return;
  }
  launching_ = true;
  try {
    while (const auto bucket_index = launches_.pop()) {
      if (!predicted_unused(*bucket_index)) {
        launch(*bucket_index);
      }
    }
    if (context_.settings.manual_finalization && launches_.empty()) {
      launch_agreements();
      context_.observer.peers().note(health::Doing::kBackward);
    }
  } catch (...) {
    launch_error_ = std::current_exception();
    throw;
  }
  launching_ = false;
}

void Step::launch(std::size_t bucket_index) {
  if (kind_ == Kind::kWithoutGrads) {
    zeros_.emplace(
        bucket_index, context_.buckets[bucket_index].zeros_like(context_.params.tensors()));
  }
  auto& bucket = this->bucket(bucket_index);
  const auto& hook = context_.settings.comm_hook;
  // The device passes a recorded launch when the gradients of all streams are packed.
  bucket.prepare_launch();
  context_.emit(StepEvent::kLaunched, bucket_index);
  context_.observer.peers().note_launch(
      bucket_index, bucket.num_bytes(), static_cast<int>(bucket.dtypes().summed));
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

}  // namespace ddpx
