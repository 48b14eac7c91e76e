// The begin of a step, the arrival of gradients, and the launch of buckets.
#include "step.h"

#include <string>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {
namespace {

std::vector<std::size_t> frozen_params(const ReducerContext& context) {
  std::vector<std::size_t> frozen;
  for (std::size_t i = 0; i < context.params.size(); ++i) {
    if (!context.params.requires_grad(i)) {
      frozen.push_back(i);
    }
  }
  return frozen;
}

std::vector<std::size_t> unused_params(const ReducerContext& context) {
  return context.options.mode == GraphMode::kFindUnused ? context.history.use.prediction.unused()
                                                        : std::vector<std::size_t>();
}

bool is_delayed(const ReducerContext& context, std::size_t bucket_index) {
  const auto first = context.buckets.plan().buckets()[bucket_index].param_indices.front();
  return context.options.delay_trigger && context.params.metas()[first].delayed;
}

// The divisor that gradients are packed with.
std::optional<int> divisor_of(const ReducerContext& context) {
  const auto& settings = context.settings;
  const bool divides_later = settings.comm_hook || context.options.average != Average::kMean;
  if (divides_later) {
    return std::nullopt;
  }
  return settings.divisor.value_or(context.collective->world_size());
}

// As published to peers: settings that make the collective calls different.
uint64_t settings_of(const ReducerContext& context) {
  using health::StepCalls;
  const auto& settings = context.settings;
  const bool hook_differs =
      settings.comm_hook_is_registered && !context.collective->sums_by_group();
  return StepCalls::kKnown | (hook_differs ? StepCalls::kHasHook : 0) |
         (context.options.mode == GraphMode::kStatic ? StepCalls::kIsStatic : 0) |
         (settings.check_finite ? StepCalls::kChecksFinite : 0);
}

std::optional<WeightSum> take_weight(ReducerContext& context) {
  return context.options.average == Average::kWeights
             ? std::make_optional<WeightSum>(context.weights.take(context.params.device()))
             : std::nullopt;
}

}  // namespace

Step::Step(ReducerContext& context)
    : context_(context),
      collectives_(context, take_weight(context)),
      divisor_(divisor_of(context)),
      frozen_(frozen_params(context)),
      arrivals_(context.history.arrivals, frozen_, unused_params(context)),
      params_(context.params.size()),
      launches_(context.buckets.size()) {
  const auto& plan = context_.buckets.plan().buckets();
  buckets_.reserve(context_.buckets.size());
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    const bool delayed = is_delayed(context_, b);
    const bool when_full = context_.options.batched_copy && !context_.buckets[b].sparse();
    buckets_.push_back({plan[b].param_indices.size() + delayed, when_full, delayed});
  }
}

void Step::report(UserError error) {
  context_.observer.peers().spoil_results();
  if (!error_) {
    error_ = std::move(error);
  }
}

// ---- gradients arrive ---------------------------------------------------------------------------

void Step::begin() {
  context_.observer.peers().set_settings(settings_of(context_));
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
  for (const auto param_index : context_.history.arrivals.known_unused()) {
    if (!params_[param_index].excluded) {
      mark_param_ready(param_index);
    }
  }
}

void Step::exclude_frozen() {
  for (const auto param_index : frozen_) {
    params_[param_index].excluded = true;
    context_.cast_grad_to_averaged(param_index);
    if (context_.options.mode == GraphMode::kStatic && context_.use_is_exchanged()) {
      context_.history.use.map.mark(
          param_index);  // exchanged once for all steps: it may be thawed later
    }
  }
  context_.observer.peers().publish_frozen(frozen_);
}

// A local backward marked the param. Then the script froze the param and dropped the gradient.
void Step::unmark_dropped() {
  for (const auto param_index : frozen_) {
    if (!grad_of(context_.params[param_index]).defined()) {
      context_.history.use.map.unmark(param_index);
    }
  }
}

void Step::arrive(std::size_t param_index) {
  context_.emit(StepEvent::kGradArrived, param_index);
  context_.mark_used(param_index);
  if (auto* check = collectives_.finite_check()) {
    check->record_arrival(param_index);
  }
  const bool order_counts = context_.history.order.wanted();
  switch (arrivals_.arrive(param_index)) {
    case Arrival::kFinal:
      if (order_counts) {
        order_.push_back(param_index);
      }
      params_[param_index].kept.reset();
      mark_param_ready(param_index);
      break;
    case Arrival::kPartial:
      context_.add_stream_of(param_index);
      if (order_counts && context_.history.arrivals.learning()) {
        order_.push_back(param_index);
      }
      context_.cast_grad_to_local(param_index);
      if (context_.history.arrivals.learning()) {
        move_into_bucket(param_index);
      }
      keep(param_index, grad_of(context_.params[param_index]));
      context_.params.links().push(param_index);
      break;
    case Arrival::kRepeated:
      report_late(param_index);
      break;
    case Arrival::kUnforeseen:
      report(context_.error(
          "parameter '" + context_.params.name(param_index) +
          "' got a gradient, but was not in the graph of this backward. The gradient was averaged "
          "without the contribution of this rank. A backward inside this backward produced the "
          "gradient. Use checkpoint(..., use_reentrant=False), or use this parameter in the first "
          "backward. Restart from a checkpoint."));
      break;
    case Arrival::kFrozen:
      break;
  }
}

void Step::mark_param_ready(std::size_t param_index) {
  auto& param = params_[param_index];
  if (!context_.communicates()) {
    context_.cast_grad_to_averaged(param_index);
    if (auto* check = collectives_.finite_check(); check != nullptr && !param.excluded) {
      check->check({param_index}, {grad_of(context_.params[param_index])});
    }
    return;
  }
  const auto bucket_index = context_.buckets.plan().location(param_index).bucket_index;
  if (!collectives_.predicted_unused(bucket_index)) {
    pack_param(param_index);
  } else if (arrivals_.arrived(param_index) && !param.kept) {
    keep(param_index, grad_of(context_.params[param_index]));
  }
  count_down(bucket_index);
  if (context_.options.delay_trigger == param_index) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (buckets_[b].delayed) {
        count_down(b);
      }
    }
  }
}

// ---- launching ----------------------------------------------------------------------------------

void Step::count_down(std::size_t bucket_index) {
  auto& outstanding = buckets_.at(bucket_index).outstanding;
  if (outstanding == 0) {
    throw InternalError(
        "bucket " + std::to_string(bucket_index) + " has all gradients, but got one more");
  }
  context_.buckets[bucket_index].add_stream();
  if (--outstanding != 0) {
    return;
  }
  context_.emit(StepEvent::kBucketReady, bucket_index);
  if (!collectives_.predicted_unused(bucket_index)) {
    complete(bucket_index);
  }
  launches_.mark_ready(bucket_index);
  launches_.launch_ready([this](std::size_t ready) { launch(ready); });
}

// All gradients of the bucket are packed or kept.
void Step::complete(std::size_t bucket_index) {
  if (buckets_[bucket_index].when_full) {
    pack_together(bucket_index);
  } else if (context_.buckets[bucket_index].has_small_slots()) {
    pack_small(bucket_index);
  }
  if (collectives_.finite_check() != nullptr) {
    check_finite(context_.buckets[bucket_index]);
  }
}

void Step::launch(std::size_t bucket_index) {
  if (!collectives_.predicted_unused(bucket_index)) {
    collectives_.launch(bucket_index, context_.buckets[bucket_index]);
  }
  if (context_.settings.manual_finalization && launches_.empty()) {
    launch_agreements();
    context_.observer.peers().publish(health::Doing::kBackward);
  }
}

}  // namespace ddpx
