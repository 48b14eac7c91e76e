#include "packing.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/MaybeOwned.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <string>

#include "../count.h"
#include "../errors.h"
#include "dense_copy.h"
#include "device_stream.h"
#include "grad_scaling.h"
#include "grad_values.h"
#include "normal_tensors.h"
#include "param_grad.h"
#include "sparse_rows.h"

namespace ddpx {
namespace {

// The offset first: a gradient in memory of its own mostly differs there.
bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.storage_offset() == b.storage_offset() && share_storage(a, b) &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

// `param.grad` never is the view of the slot itself: module.to(...) swaps the memory of a gradient
// in place. For autograd it is no view at all: a script may change it with autograd in place, and
// the history then belongs to this gradient alone. So does the version: a change of this gradient
// is not one of its neighbours in the buffer.
void alias_slot(const at::Tensor& param, const Slot& slot) {
  const auto& present = slot.grad_alias;
  if (!present.defined() || present.requires_grad() || !same_place(present, slot.view)) {
    slot.grad_alias = slot.view.variable_data();
  }
  replace_grad(param, slot.grad_alias);
}

// A graph of the script may have saved the alias. Autograd refuses it from now on, as after an
// in-place operation.
void mark_overwritten(const Slot& slot) {
  const auto& alias = slot.grad_alias;
  if (alias.defined() && alias.unsafeGetTensorImpl()->version_counter().enabled()) {
    torch::autograd::impl::bump_version(alias);
  }
}

// Whether `grad` is the alias that alias_slot() gave out, and still in the slot.
bool is_alias(const Slot& slot, const at::Tensor& grad) {
  return grad.is_same(slot.grad_alias) && grad.storage_offset() == slot.view.storage_offset() &&
         share_storage(grad, slot.view);
}

// Whether `grad`, which shares the storage of the buffer, has no element outside the slot.
bool within(const Slot& slot, const at::Tensor& grad) {
  auto last = grad.storage_offset();
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    last += (grad.size(dim) - 1) * grad.stride(dim);
  }
  const auto begin = slot.view.storage_offset();
  return grad.numel() == 0 || (grad.scalar_type() == slot.view.scalar_type() &&
                               grad.storage_offset() >= begin && last < begin + slot.view.numel());
}

// A gradient that can be copied into the slot: `grad` itself, if it holds its values and is outside
// the slot.
c10::MaybeOwned<at::Tensor> values_for(const Slot& slot, const at::Tensor& grad) {
  return holds_values(grad) && !share_storage(grad, slot.view)
             ? c10::MaybeOwned<at::Tensor>::borrowed(grad)
             : c10::MaybeOwned<at::Tensor>::owned(copy_of_values(grad));
}

// A gradient without values. A slot has the layout that autograd gives to a gradient of its param
// (the "gradient layout contract" of torch/csrc/autograd/functions/accumulate_grad.h).
at::Tensor unfilled_grad(const at::Tensor& slot, at::ScalarType dtype) {
  const NormalTensors normal;
  return at::empty_like(slot, slot.options().dtype(dtype));
}

// Gives a gradient in the memory of the buffer memory of its own. Returns true if it was there.
bool move_out(const GradBuffer& buffer, const Slot& slot, const at::Tensor& param) {
  const auto& grad = grad_of(param);
  if (!grad.defined() || !share_storage(grad, slot.view) || !has_values(grad)) {
    return false;
  }
  const auto values = holds_values(grad) ? grad : copy_of_values(grad);
  const auto own = unfilled_grad(slot.view, buffer.dtypes().averaged);
  own.copy_(values);
  replace_grad(param, own);
  return true;
}

// Gradients that are copied into their slots together. The current stream waits for the streams
// that the gradients arrived on.
class CopiesIntoSlots {
 public:
  CopiesIntoSlots(GradBuffer& buffer, GradPlace place)
      : place_(place),
        averaged_(buffer.dtypes().averaged),
        on_current_stream_(buffer.on_current_stream()) {
    buffer.wait_for_streams();
  }

  void add(const Slot& slot, const at::Tensor& param, const at::Tensor& grad) {
    const bool present = grad_of(param).is_same(grad);
    const bool alias = place_ == GradPlace::kInSlot && present;
    if (alias) {
      alias_slot(param, slot);
    }
    views_.push_back(slot.view);
    sources_.push_back(*values_for(slot, grad));
    if (alias || !present || !on_current_stream_ || grad.scalar_type() != averaged_) {
      keep_for_current_stream(grad);  // write_back() drops a gradient in another dtype
    }
  }

  void run() {
    if (!views_.empty()) {
      at::_foreach_copy_(views_, sources_);
    }
  }

 private:
  GradPlace place_;
  at::ScalarType averaged_;
  bool on_current_stream_;
  std::vector<at::Tensor> views_;
  std::vector<at::Tensor> sources_;
};

// Slots side by side are one range of the buffer.
class SlotRanges {
 public:
  explicit SlotRanges(const GradBuffer& buffer) : buffer_(buffer) {}

  // Slots are added in ascending order.
  void add(std::size_t slot) {
    if (ends_.empty() || ends_.back() != slot) {
      begins_.push_back(slot);
      ends_.push_back(slot);
    }
    ++ends_.back();
  }

  bool empty() const {
    return begins_.empty();
  }

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> ranges;
    for (std::size_t i = 0; i < begins_.size(); ++i) {
      ranges.push_back(buffer_.slots_between(begins_[i], ends_[i]));
    }
    return ranges;
  }

 private:
  const GradBuffer& buffer_;
  std::vector<std::size_t> begins_;
  std::vector<std::size_t> ends_;
};

std::optional<Misfit> find_sparse_misfit(const GradBuffer& buffer, const at::Tensor& grad) {
  if (!grad.is_sparse() || grad.device() != buffer.device() || !buffer.takes(grad.scalar_type())) {
    std::ostringstream expected;
    expected << "a sparse gradient of dtype " << buffer.dtypes().arriving << " on "
             << buffer.device();
    return Misfit{describe(grad), expected.str()};
  }
  if (!buffer.rows().defined()) {
    return std::nullopt;
  }
  if (grad.sparse_dim() != 1) {
    return Misfit{
        describe(grad) + " with " + count(grad.sparse_dim(), "sparse dimension"),
        "a gradient with 1 sparse dimension, because _set_sparse_metadata() got its rows"};
  }
  if (const auto row = row_outside(grad, buffer.rows())) {
    return Misfit{
        "a gradient for row " + std::to_string(*row),
        "only the rows that were passed to _set_sparse_metadata()"};
  }
  return std::nullopt;
}

}  // namespace

// A write to one then changes the other.
bool lies_in(const Slot& slot, const at::Tensor& grad) {
  return holds_values(grad) && same_place(grad, slot.view);
}

std::optional<Misfit> find_misfit(
    const GradBuffer& buffer, const Slot& slot, const at::Tensor& grad) {
  if (!grad.defined()) {
    return std::nullopt;
  }
  if (buffer.sparse()) {
    return find_sparse_misfit(buffer, grad);
  }
  const bool fits = has_values(grad) && buffer.takes(grad.scalar_type()) &&
                    grad.device() == slot.view.device() && grad.sizes() == slot.view.sizes();
  if (!fits) {
    return Misfit{describe(grad), describe(slot.view, buffer.dtypes().arriving)};
  }
  if (share_storage(grad, slot.view) && !within(slot, grad)) {
    return Misfit{
        describe(grad) + " in the memory of the gradient of another parameter",
        "a gradient in memory of its own"};
  }
  if (holds_values(grad)) {
    return std::nullopt;
  }
  if (const auto reason = why_no_copy(grad)) {
    return Misfit{
        describe(grad) + " of a subclass of torch.Tensor that cannot be copied (" + *reason + ')',
        describe(slot.view, buffer.dtypes().arriving)};
  }
  return std::nullopt;
}

void pack(
    GradBuffer& buffer,
    const Slot& slot,
    const at::Tensor& param,
    const at::Tensor& given,
    std::optional<int> divisor,
    GradPlace place) {
  RECORD_FUNCTION("ddpx::pack", {});
  std::optional<at::NoGradGuard> no_grad;
  if (at::GradMode::is_enabled()) {  // a backward with create_graph=True
    no_grad.emplace();
  }
  if (buffer.sparse()) {
    const auto dtype = buffer.dtypes().summed;
    if (given.defined()) {
      keep_for_current_stream(given);  // write_back() drops it
    }
    // Not in place: two gradients may share one values tensor (two embeddings whose outputs are
    // added).
    if (!given.defined()) {
      buffer.set_sparse(empty_sparse_grad(param, dtype));
    } else {
      buffer.set_sparse(divisor ? given.to(dtype).div(*divisor) : given.to(dtype).clone());
    }
    return;
  }
  mark_overwritten(slot);
  const bool moved = place == GradPlace::kMovedOut && move_out(buffer, slot, param);
  const auto& grad = moved && given.defined() ? grad_of(param) : given;
  if (!grad.defined()) {
    slot.view.zero_();
  } else if (lies_in(slot, grad)) {
    if (place == GradPlace::kMovedIn) {
      pack_scaled(slot.view, slot.view, divisor);
    } else {
      divide_in_place(slot.view, divisor);
    }
  } else {
    pack_scaled(*values_for(slot, grad), slot.view, divisor);
    const auto& present = grad_of(param);
    const bool replaced = !grad.is_same(present);
    const bool alias = place != GradPlace::kOwnMemory && place != GradPlace::kMovedOut && !replaced;
    if (alias || replaced || grad.scalar_type() != buffer.dtypes().averaged) {
      keep_for_current_stream(grad);  // write_back() drops a gradient in another dtype
    }
    if (alias) {
      alias_slot(param, slot);
    }
  }
}

void pack_all(
    GradBuffer& buffer,
    const std::vector<at::Tensor>& params,
    const std::vector<std::optional<at::Tensor>>& grads,
    std::optional<int> divisor,
    GradPlace place) {
  RECORD_FUNCTION("ddpx::pack", {});
  const at::NoGradGuard no_grad;
  CopiesIntoSlots copies(buffer, place);
  SlotRanges zeros(buffer);
  SlotRanges copied(buffer);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const auto& slot = buffer.slots()[i];
    if (grads[i]) {
      mark_overwritten(slot);
    }
    if (grads[i] && !grads[i]->defined()) {
      zeros.add(i);
    } else if (grads[i] && !lies_in(slot, *grads[i])) {
      copies.add(slot, params[slot.param_index], *grads[i]);
      copied.add(i);
    }
  }
  copies.run();
  if (!zeros.empty()) {
    at::_foreach_zero_(zeros.tensors());
  }
  if (divisor.value_or(1) == 1 || copied.empty()) {
    return;
  }
  const auto products = copied.tensors();
  if (products[0].element_size() > 2) {
    at::_foreach_mul_(products, 1.0 / *divisor);
    return;
  }
  // On some devices torch's grouped product of 16 bits rounds the factor to 16 bits, unlike DDP.
  for (const auto& product : products) {
    pack_scaled(product, product, divisor);
  }
}

void write_back(
    const Bucket& bucket,
    const std::vector<const Slot*>& slots,
    const std::vector<at::Tensor>& params,
    GradPlace place) {
  RECORD_FUNCTION("ddpx::write_back", {});
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;  // copied together at the end, which on a device is one operation
  std::vector<at::Tensor> sources;
  const auto copy = [&](const at::Tensor& from, const at::Tensor& to) {
    if (copy_dense(from, to)) {
      return true;
    }
    if (!takes_values(to, from.sizes())) {
      return false;
    }
    if (!holds_values(to)) {
      return overwrite(to, from);
    }
    grads.push_back(to);
    sources.push_back(from);
    return true;
  };
  const auto fill = [&](const at::Tensor& from, const at::Tensor& to) {
    if (!copy(from, to)) {
      throw InternalError("the memory for the average of a gradient cannot be written");
    }
  };
  for (const auto* slot : slots) {
    const auto& param = params[slot->param_index];
    const auto& grad = grad_of(param);
    if (bucket.sparse()) {
      replace_grad(param, bucket.reduced().to(bucket.dtypes().averaged));
      continue;
    }
    const auto reduced = bucket.reduced_slot(*slot);
    if (place == GradPlace::kInSlot) {
      mark_overwritten(*slot);
      if (!reduced.is_alias_of(slot->view)) {
        fill(reduced, slot->view);
      }
      if (!grad.defined() || !(is_alias(*slot, grad) || lies_in(*slot, grad))) {
        alias_slot(param, *slot);
      }
    } else if (
        !grad.defined() || grad.scalar_type() != bucket.dtypes().averaged || !copy(reduced, grad)) {
      const auto new_grad = unfilled_grad(reduced, bucket.dtypes().averaged);
      fill(reduced, new_grad);
      replace_grad(param, new_grad);
    }
  }
  if (!grads.empty()) {
    at::_foreach_copy_(grads, sources);
  }
}

bool move_into_slot(const GradBuffer& buffer, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  const auto& grad = grad_of(param);
  if (!grad.defined() || buffer.sparse() || find_misfit(buffer, slot, grad) ||
      lies_in(slot, grad)) {
    return false;
  }
  slot.view.copy_(*values_for(slot, grad));
  keep_for_current_stream(grad);
  alias_slot(param, slot);
  return true;
}

}  // namespace ddpx
