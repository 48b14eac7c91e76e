#include "slot_io.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/alias.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <sstream>
#include <string>

#include "dense_copy.h"
#include "device_stream.h"
#include "grad_copy.h"
#include "sparse_rows.h"

namespace ddpx {
namespace {

std::string describe(const at::Tensor& tensor, at::ScalarType dtype) {
  std::ostringstream out;
  out << (tensor.is_sparse() ? "a sparse " : "a dense ") << dtype << " tensor of shape "
      << tensor.sizes() << " on " << tensor.device();
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

// Gives a gradient that lies in the slot memory of its own.
void move_out(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (grad.defined() && !grad.is_sparse() && grad.is_alias_of(slot.view)) {
    grad = unpack_new(slot.view, param, bucket.dtypes().averaged);
  }
}

}  // namespace

std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& grad) {
  if (!grad.defined()) {
    return std::nullopt;
  }
  if (bucket.sparse()) {
    if (!grad.is_sparse()) {
      return Misfit{describe(grad, grad.scalar_type()), "a sparse gradient"};
    }
    const auto row = bucket.rows().defined() ? row_outside(grad, bucket.rows()) : std::nullopt;
    if (row) {
      return Misfit{
          "a gradient for row " + std::to_string(*row),
          "only the rows that were passed to _set_sparse_metadata()"};
    }
    return std::nullopt;
  }
  const bool fits = !grad.is_sparse() && bucket.takes(grad.scalar_type()) &&
                    grad.device() == slot.view.device() && grad.sizes() == slot.view.sizes();
  if (fits) {
    return std::nullopt;
  }
  return Misfit{describe(grad, grad.scalar_type()), describe(slot.view, bucket.dtypes().arriving)};
}

void pack(
    Bucket& bucket,
    const Slot& slot,
    const at::Tensor& param,
    const at::Tensor& grad,
    int divisor,
    bool as_view) {
  RECORD_FUNCTION("ddpx::pack", {});
  const at::NoGradGuard no_grad;
  if (bucket.sparse()) {
    const auto dtype = bucket.dtypes().summed;
    bucket.set_sparse(
        grad.defined() ? divide_sparse(grad.to(dtype), divisor) : empty_sparse_grad(param, dtype));
  } else if (!grad.defined()) {
    slot.view.zero_();
  } else if (grad.is_alias_of(slot.view)) {
    divide_in_place(slot.view, divisor);
  } else {
    pack_scaled(grad, slot.view, divisor);
    auto& present = param.mutable_grad();
    const bool replaced = !grad.is_same(present);
    if (as_view || replaced || grad.scalar_type() != bucket.dtypes().averaged) {
      keep_for_current_stream(grad);  // write_back() drops one in another dtype
    }
    if (as_view && !replaced) {
      lay_in_slot(present, slot);
    }
  }
}

void pack_together(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    bool as_view) {
  RECORD_FUNCTION("ddpx::pack", {});
  const at::NoGradGuard no_grad;
  bucket.join_streams();
  const auto held = bucket.take_held();
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> views;
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto& slot = bucket.slots()[i];
    if (left_out[slot.param_index]) {
      continue;
    }
    if (!held[i].defined()) {
      slot.view.zero_();
    } else if (!held[i].is_alias_of(slot.view)) {
      views.push_back(slot.view);
      grads.push_back(held[i]);
      auto& grad = params[slot.param_index].mutable_grad();
      if (as_view && grad.is_same(held[i])) {
        lay_in_slot(grad, slot);
      }
    }
  }
  if (grads.empty()) {
    return;
  }
  at::_foreach_copy_(views, grads);
  for (const auto& grad : grads) {
    keep_for_current_stream(grad);
  }
}

void pack_apart(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor) {
  if (!bucket.sparse()) {
    move_out(bucket, slot, param);
  }
  pack(bucket, slot, param, param.grad(), divisor, /*as_view=*/false);
}

void pack_nothing(Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  if (bucket.sparse()) {
    bucket.set_sparse(empty_sparse_grad(param, bucket.dtypes().summed));
    return;
  }
  move_out(bucket, slot, param);
  const at::NoGradGuard no_grad;
  slot.view.zero_();
}

void write_back(
    const Bucket& bucket,
    const std::vector<const Slot*>& slots,
    const std::vector<at::Tensor>& params,
    bool as_view) {
  RECORD_FUNCTION("ddpx::write_back", {});
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
    const auto& param = params[slot->param_index];
    auto& grad = param.mutable_grad();
    if (bucket.sparse()) {
      grad = bucket.reduced().to(bucket.dtypes().averaged);
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
    } else if (grad.defined() && grad.scalar_type() == bucket.dtypes().averaged) {
      copy(reduced, grad);
    } else {
      grad = unpack_new(reduced, param, bucket.dtypes().averaged);
    }
  }
  if (!grads.empty()) {
    at::_foreach_copy_(grads, sources);
  }
}

void adopt(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (grad.defined() && !bucket.sparse() && !find_misfit(bucket, slot, grad)) {
    slot.view.copy_(grad);
    lay_in_slot(grad, slot);
  }
}

}  // namespace ddpx
