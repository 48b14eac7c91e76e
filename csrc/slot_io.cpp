#include "slot_io.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/alias.h>
#include <c10/core/GradMode.h>

#include <sstream>
#include <string>

#include "dense_copy.h"
#include "grad_copy.h"
#include "sparse_rows.h"

namespace ddpx {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream out;
  out << (tensor.is_sparse() ? "a sparse " : "a dense ") << tensor.scalar_type()
      << " tensor of shape " << tensor.sizes() << " on " << tensor.device();
  return out.str();
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

// Not the slot's own view: module.to(...) swaps the memory of a gradient in place.
void lay_in_slot(at::Tensor& grad, const Slot& slot) {
  if (!slot.lent.defined() || !same_place(slot.lent, slot.view)) {
    slot.lent = at::alias(slot.view);
  }
  grad = slot.lent;
}

struct Gathered {
  std::vector<at::Tensor> copied;    // slots that were filled with a gradient from outside
  std::vector<at::Tensor> in_place;  // slots whose gradient lay there
};

// Brings the gradients of all params but those `left_out` into their slots, unscaled.
Gathered gather(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    bool as_view) {
  const at::NoGradGuard no_grad;
  Gathered gathered;
  std::vector<at::Tensor> grads;
  for (const auto& slot : bucket.slots()) {
    auto& grad = params[slot.param_index].mutable_grad();
    if (left_out[slot.param_index]) {
      continue;
    }
    if (!grad.defined()) {
      slot.view.zero_();
    } else if (grad.is_alias_of(slot.view)) {
      gathered.in_place.push_back(slot.view);
    } else {
      gathered.copied.push_back(slot.view);
      grads.push_back(grad);
      if (as_view) {
        lay_in_slot(grad, slot);
      }
    }
  }
  if (!grads.empty()) {
    at::_foreach_copy_(gathered.copied, grads);
  }
  return gathered;
}

// Gives a gradient that lies in the slot memory of its own; true if it did.
bool move_out(const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (!grad.defined() || grad.is_sparse() || !grad.is_alias_of(slot.view)) {
    return false;
  }
  grad = unpack_new(slot.view, param);
  return true;
}

}  // namespace

std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const auto& grad = param.grad();
  if (!grad.defined()) {
    return std::nullopt;
  }
  if (bucket.sparse()) {
    if (!grad.is_sparse()) {
      return Misfit{describe(grad), "a sparse gradient"};
    }
    const auto row = bucket.rows().defined() ? row_outside(grad, bucket.rows()) : std::nullopt;
    if (row) {
      return Misfit{
          "a gradient for row " + std::to_string(*row),
          "only rows that _set_sparse_metadata() was given"};
    }
    return std::nullopt;
  }
  const bool fits = !grad.is_sparse() && grad.scalar_type() == slot.view.scalar_type() &&
                    grad.device() == slot.view.device() && grad.sizes() == slot.view.sizes();
  return fits ? std::nullopt : std::optional(Misfit{describe(grad), describe(slot.view)});
}

void pack(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor, bool as_view) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (bucket.sparse()) {
    bucket.set_sparse(grad.defined() ? divide_sparse(grad, divisor) : empty_sparse_grad(param));
  } else if (!grad.defined()) {
    slot.view.zero_();
  } else if (grad.is_alias_of(slot.view)) {
    divide_in_place(slot.view, divisor);
  } else {
    pack_scaled(grad, slot.view, divisor);
    if (as_view) {
      lay_in_slot(grad, slot);
    }
  }
}

void pack_as_if_in_slot(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor) {
  pack(bucket, slot, param, /*divisor=*/1, /*as_view=*/false);
  if (!bucket.sparse()) {
    const at::NoGradGuard no_grad;
    divide_in_place(slot.view, divisor);
  }
}

void pack_together(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    bool as_view) {
  gather(bucket, params, left_out, as_view);
}

void pack_scaled_together(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    int divisor,
    bool as_view) {
  const at::NoGradGuard no_grad;
  const auto [copied, in_place] = gather(bucket, params, left_out, as_view);
  if (divisor == 1) {
    return;
  }
  // A product for what was copied and a quotient for what lay there, as pack() has it.
  if (copied.size() == bucket.slots().size()) {
    bucket.multiply(1.0 / divisor);
  } else if (!copied.empty()) {
    at::_foreach_mul_(copied, 1.0 / divisor);
  }
  if (in_place.size() == bucket.slots().size()) {
    bucket.divide(divisor);
  } else if (!in_place.empty()) {
    at::_foreach_div_(in_place, divisor);
  }
}

void pack_apart(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor) {
  if (!bucket.sparse()) {
    move_out(slot, param);
  }
  pack(bucket, slot, param, divisor, /*as_view=*/false);
}

bool pack_nothing(Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  if (bucket.sparse()) {
    bucket.set_sparse(empty_sparse_grad(param));
    return false;
  }
  const bool lay_in_slot = move_out(slot, param);
  const at::NoGradGuard no_grad;
  slot.view.zero_();
  return lay_in_slot;
}

void write_back(
    const Bucket& bucket,
    const std::vector<const Slot*>& slots,
    const std::vector<at::Tensor>& params,
    bool as_view) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;  // copied together at the end, which on a device is one operation
  std::vector<at::Tensor> sources;
  const auto copy = [&](const at::Tensor& from, const at::Tensor& to) {
    if (!copy_dense(from, to)) {
      grads.push_back(to);
      sources.push_back(from);
    }
  };
  for (const auto* slot : slots) {
    auto& grad = params[slot->param_index].mutable_grad();
    if (bucket.sparse()) {
      grad = bucket.reduced();
      continue;
    }
    const auto reduced = bucket.reduced_slot(*slot);
    if (as_view) {
      if (!reduced.is_alias_of(slot->view)) {
        copy(reduced, slot->view);
      }
      if (!grad.defined() || !grad.is_alias_of(slot->view)) {
        lay_in_slot(grad, *slot);
      }
    } else if (grad.defined()) {
      copy(reduced, grad);
    } else {
      grad = unpack_new(reduced, params[slot->param_index]);
    }
  }
  if (!grads.empty()) {
    at::_foreach_copy_(grads, sources);
  }
}

void write_back_to(
    const Bucket& bucket, const Slot& slot, const Slot& home, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  home.view.copy_(bucket.reduced_slot(slot));
  lay_in_slot(param.mutable_grad(), home);
}

void adopt(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (grad.defined() && !bucket.sparse() && !find_misfit(bucket, slot, param)) {
    slot.view.copy_(grad);
    lay_in_slot(grad, slot);
  }
}

}  // namespace ddpx
