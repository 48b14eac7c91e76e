// The begin of a step, and gradients on their way into buckets.
#include "step.h"

#include <string>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {
namespace {

UserError gradient_mismatch(
    const errors::Where& where,
    const std::string& name,
    const std::string& gradient,
    const std::string& expected) {
  const std::string sparse = "a sparse ";
  const bool is_sparse = gradient.compare(0, sparse.size(), sparse) == 0;
  const bool expects_sparse = expected.compare(0, sparse.size(), sparse) == 0;
  const std::string remedy =
      is_sparse == expects_sparse
          ? "Cast, move or replace parameters before wrapping, or wrap the module again."
          : "Sparse gradients are expected for the weights of nn.Embedding(sparse=True) and "
            "nn.EmbeddingBag(sparse=True), and for no other use of these weights. Pass "
            "sparse=False.";
  return errors::at(
      where,
      "the gradient of parameter '" + name + "' is " + gradient +
          ", but the bucket of this parameter was made for " + expected + ". " + remedy +
          (expects_sparse && !is_sparse
               ? " In DDP's words: Expected variable to have sparse gradient."
               : ""));
}

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

// A bucket of delayed params that holds the trigger itself waits for the trigger anyway.
bool is_delayed(const ReducerContext& context, std::size_t bucket_index) {
  const auto trigger = context.options.delay_trigger;
  const auto& plan = context.buckets.plan();
  return trigger &&
         context.params.metas()[plan.buckets()[bucket_index].param_indices.front()].delayed &&
         plan.location(*trigger).bucket_index != bucket_index;
}

// The divisor that gradients are packed with.
int divisor_of(const ReducerContext& context) {
  const auto& settings = context.settings;
  const bool divides_later = settings.comm_hook || context.options.average != Average::kMean;
  return divides_later ? 1 : settings.divisor.value_or(context.collective->world_size());
}

std::optional<WeightSum> take_weight(ReducerContext& context) {
  return context.options.average == Average::kWeights
             ? std::make_optional<WeightSum>(context.weights.take(context.params.device()))
             : std::nullopt;
}

uint32_t version_of(const at::Tensor& grad) {
  const auto* impl = grad.unsafeGetTensorImpl();  // that of an undefined tensor counts nothing
  return impl->version_counter().enabled() ? impl->version_counter().current_version() : 0;
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

GradPlace Step::place_in(const Bucket& bucket) const {
  return context_.options.gradient_as_bucket_view && bucket.can_hold_grads()
             ? GradPlace::kInSlot
             : GradPlace::kOwnMemory;
}

void Step::report(UserError error) {
  context_.observer.peers().spoil_results();
  if (!error_) {
    error_ = std::move(error);
  }
}

// ---- gradients arrive ---------------------------------------------------------------------------

void Step::begin() {
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
  context_.observer.peers().note_frozen(frozen_);
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
      if (order_counts && context_.history.arrivals.learning() &&
          (context_.options.mode != GraphMode::kStatic || context_.history.use.static_use_known)) {
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
    params_[param_index].moved = true;
  }
}

// A hook of the user may replace or clear `param.grad` before the gradient is packed.
void Step::keep(std::size_t param_index, at::Tensor grad) {
  if (context_.communicates()) {
    auto& state = params_[param_index];
    state.version = version_of(grad);
    state.kept = std::move(grad);
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

// ---- packing ------------------------------------------------------------------------------------

// Allocates the memory of a lazy bucket. With views, present gradients of all its params move
// there, as in DDP: the gradient that has just arrived, and gradients of earlier backwards.
void Step::ensure_memory(Bucket& bucket) {
  const auto& tensors = context_.params.tensors();
  if (!bucket.ensure_memory(*context_.collective, tensors) ||
      place_in(bucket) != GradPlace::kInSlot) {
    return;
  }
  bucket.wait_for_streams();
  bucket.add_stream();
  for (const auto& slot : bucket.slots()) {
    auto& state = params_[slot.param_index];
    const auto& param = tensors[slot.param_index];
    const bool is_kept = state.kept && state.kept->is_same(grad_of(param));
    if (!state.excluded && move_into_slot(bucket, slot, param) && is_kept) {
      state.kept = grad_of(param);
    }
  }
}

// Packs the gradient of the param, or keeps it until the bucket is full. The slot of an excluded
// param gets the present gradient of a frozen param, which stays unchanged, or zeros.
void Step::pack_param(std::size_t param_index) {
  auto& bucket = context_.buckets.of(param_index);
  if (context_.options.lazy_buckets) {
    ensure_memory(bucket);
  }
  const auto& slot = context_.buckets.slot_of(param_index);
  const auto& param = context_.params[param_index];
  auto& state = params_[param_index];
  const bool when_full =
      buckets_[context_.buckets.plan().location(param_index).bucket_index].when_full;
  const auto kept = std::exchange(state.kept, std::nullopt);
  const auto& grad = kept ? *kept : grad_of(param);
  if (kept && context_.options.mode != GraphMode::kStatic) {
    check_unchanged(param_index, grad);
  }
  const bool fits = check_fit(bucket, slot, grad);
  if (state.excluded) {
    const auto frozen = fits ? grad_of(param) : at::Tensor();
    // A batched bucket is divided as a whole.
    pack(bucket, slot, param, frozen, when_full ? 1 : divisor_, GradPlace::kMovedOut);
  } else if (when_full || slot.small) {
    keep(param_index, grad);
  } else {
    const auto place = state.moved ? GradPlace::kMovedIn : place_in(bucket);
    pack(bucket, slot, param, grad, divisor_, place);
  }
}

// If the gradient does not fit its slot, this rank sends zeros, so that peers do not wait. The
// error is raised at the end of the step. The gradient of a frozen param is of no use anyway.
bool Step::check_fit(const Bucket& bucket, const Slot& slot, const at::Tensor& grad) {
  const auto misfit = find_misfit(bucket, slot, grad);
  if (misfit && !std::exchange(params_[slot.param_index].excluded, true)) {
    report(gradient_mismatch(
        context_.where(),
        context_.params.name(slot.param_index),
        misfit->gradient,
        misfit->expected));
  }
  return !misfit;
}

void Step::pack_together(std::size_t bucket_index) {
  auto& bucket = context_.buckets[bucket_index];
  if (context_.options.lazy_buckets) {
    ensure_memory(bucket);
  }
  std::vector<std::optional<at::Tensor>> grads;  // per slot
  grads.reserve(bucket.slots().size());
  for (const auto& slot : bucket.slots()) {
    auto kept = std::exchange(params_[slot.param_index].kept, std::nullopt);
    grads.push_back(
        params_[slot.param_index].excluded ? std::nullopt
                                           : std::make_optional(kept.value_or(at::Tensor())));
  }
  pack_all(bucket, context_.params.tensors(), grads, place_in(bucket));
  bucket.divide(divisor_);
  bucket.add_stream();  // another stream may launch the bucket
}

void Step::pack_small(std::size_t bucket_index) {
  auto& bucket = context_.buckets[bucket_index];
  std::vector<std::optional<SmallGrad>> grads;  // per slot
  grads.reserve(bucket.slots().size());
  for (const auto& slot : bucket.slots()) {
    auto& state = params_[slot.param_index];
    auto kept = std::exchange(state.kept, std::nullopt);
    if (!slot.small || state.excluded) {
      grads.emplace_back();
    } else {
      check_unchanged(slot.param_index, *kept);
      grads.emplace_back(SmallGrad{std::move(*kept), state.moved});
    }
  }
  ddpx::pack_small(bucket, context_.params.tensors(), grads, divisor_, place_in(bucket));
  bucket.add_stream();  // another stream may launch the bucket
}

// DDP copies a gradient when it arrives, except in the first step of a static graph. A script that
// changed a gradient in place since then would get another average. A gradient that shares its
// memory may have been changed by autograd.
void Step::check_unchanged(std::size_t param_index, const at::Tensor& grad) {
  if (version_of(grad) != params_[param_index].version &&
      grad.unsafeGetTensorImpl()->unique_version()) {
    report(
        errors::at(
            context_.where(),
            "the gradient of parameter '" + context_.params.name(param_index) +
                "' was changed in place after it had arrived and before it was copied into its "
                "bucket, for example by a hook of another parameter. The average has the changed "
                "gradient. Change a gradient in a hook of its own parameter, or after backward(). "
                "On a device, DDPX_SMALL_GRAD_BYTES=0 copies each gradient when it arrives, but "
                "for the first step."));
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
  launch_ready();
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

void Step::check_finite(Bucket& bucket) {
  bucket.wait_for_streams();
  Indices param_indices;
  std::vector<at::Tensor> grads;
  for (const auto& slot : bucket.slots()) {
    if (!params_[slot.param_index].excluded) {
      param_indices.push_back(slot.param_index);
      grads.push_back(bucket.packed_slot(slot));
    }
  }
  collectives_.finite_check()->check(param_indices, grads);
  bucket.add_stream();
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
      if (!collectives_.predicted_unused(*bucket_index)) {
        collectives_.launch(*bucket_index, context_.buckets[*bucket_index]);
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

}  // namespace ddpx
