// Gradients on their way into the slots of buckets.
#include <string>
#include <utility>

#include "../buckets/device_stream.h"
#include "../buckets/param_grad.h"
#include "step.h"

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

}  // namespace

GradPlace Step::place_in(const Bucket& bucket) const {
  return context_.options.gradient_as_bucket_view && bucket.can_hold_grads() && !grads_may_change_
             ? GradPlace::kInSlot
             : GradPlace::kOwnMemory;
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

// Allocates the memory of a lazy bucket. With views, present gradients of all its params move
// there, as in DDP: the gradient that has just arrived, and gradients of earlier backwards.
void Step::ensure_memory(Bucket& bucket) {
  const auto& tensors = context_.params.tensors();
  if (!bucket.ensure_memory(*context_.collective, tensors, context_.progress.captured) ||
      place_in(bucket) != GradPlace::kInSlot) {
    return;
  }
  bucket.wait_for_streams();
  bucket.add_stream();
  for (const auto& slot : bucket.slots()) {
    auto& state = params_[slot.param_index];
    const auto& param = tensors[slot.param_index];
    const bool is_kept = state.kept && state.kept->is_same(grad_of(param));
    if (state.excluded || !move_into_slot(bucket, slot, param)) {
      continue;
    }
    if (is_kept) {
      state.kept = grad_of(param);
    }
    // Autograd may add to the gradient before the hook of the param runs.
    if (const auto stream = context_.params.hooks()[slot.param_index].stream()) {
      wait_for_stream(*stream, *current_stream(bucket.device()));
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
  static const at::Tensor none;
  const auto& present = grads_may_change_ ? none : grad_of(param);
  const auto& grad = kept ? *kept : present;
  if (kept && context_.options.mode != GraphMode::kStatic) {
    check_unchanged(param_index, grad);
  }
  const bool fits = check_fit(bucket, slot, grad);
  if (state.excluded) {
    const auto place = grads_may_change_ ? GradPlace::kOwnMemory : GradPlace::kMovedOut;
    // A batched bucket is divided as a whole.
    const auto divisor = when_full ? std::nullopt : divisor_;
    pack(bucket, slot, param, fits ? present : none, divisor, place);
  } else if (when_full || (slot.small && !(grad.defined() && lies_in(slot, grad)))) {
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
  pack_all(bucket, context_.params.tensors(), grads, /*divisor=*/std::nullopt, place_in(bucket));
  if (divisor_) {
    bucket.divide(*divisor_);
  }
  bucket.add_stream();  // another stream may launch the bucket
}

void Step::pack_small(std::size_t bucket_index) {
  auto& bucket = context_.buckets[bucket_index];
  std::vector<std::optional<at::Tensor>> grads;  // per slot; a gradient in its slot is packed
  grads.reserve(bucket.slots().size());
  for (const auto& slot : bucket.slots()) {
    auto& state = params_[slot.param_index];
    auto kept = std::exchange(state.kept, std::nullopt);
    if (!slot.small || state.excluded) {
      kept.reset();
    } else if (kept) {
      check_unchanged(slot.param_index, *kept);
    }
    grads.push_back(std::move(kept));
  }
  pack_all(bucket, context_.params.tensors(), grads, divisor_, place_in(bucket));
  bucket.add_stream();  // another stream may launch the bucket
}

// DDP copies a gradient when it arrives, except in the first step of a static graph. A script that
// changed a gradient in place since then would get another average. A gradient that shares its
// memory may have been changed by autograd. DDP does not copy a gradient that lies in its slot.
void Step::check_unchanged(std::size_t param_index, const at::Tensor& grad) {
  if (version_of(grad) != params_[param_index].version &&
      grad.unsafeGetTensorImpl()->unique_version() &&
      !lies_in(context_.buckets.slot_of(param_index), grad)) {
    report(
        errors::at(
            context_.where(),
            "the gradient of parameter '" + context_.params.name(param_index) +
                "' was changed in place after it had arrived and before it was copied into its "
                "bucket, for example by a hook of another parameter, or by a hook of its "
                "AccumulateGrad node that is newer than the wrapper. The average has the changed "
                "gradient. Change a gradient in a hook of its own parameter, or after backward(). "
                "On a device, DDPX_SMALL_GRAD_BYTES=0 copies each gradient when it arrives, but "
                "for the first step."));
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

}  // namespace ddpx
