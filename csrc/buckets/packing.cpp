#include "packing.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/alias.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <sstream>
#include <string>
#include <utility>

#include "dense_copy.h"
#include "device_stream.h"
#include "grad_copy.h"
#include "replace_grad.h"
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

// `param.grad` never is the view of the slot itself: module.to(...) swaps the memory of a gradient
// in place.
void alias_slot(const at::Tensor& param, const Slot& slot) {
  if (!slot.grad_alias.defined() || !same_place(slot.grad_alias, slot.view)) {
    slot.grad_alias = at::alias(slot.view);
  }
  replace_grad(param, slot.grad_alias);
}

// Gives a gradient that lies in the slot memory of its own. Returns true if it lay there.
bool move_out(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const auto& grad = param.grad();
  if (!grad.defined() || grad.is_sparse() || !grad.is_alias_of(slot.view)) {
    return false;
  }
  replace_grad(param, unpack_new(slot.view, param, bucket.dtypes().averaged));
  return true;
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
    const at::Tensor& given,
    int divisor,
    GradPlace place) {
  RECORD_FUNCTION("ddpx::pack", {});
  const at::NoGradGuard no_grad;
  if (bucket.sparse()) {
    const auto dtype = bucket.dtypes().summed;
    bucket.set_sparse(
        given.defined() ? divide_sparse(given.to(dtype), divisor)
                        : empty_sparse_grad(param, dtype));
    return;
  }
  const bool moved = place == GradPlace::kMovedOut && move_out(bucket, slot, param);
  const auto& grad = moved && given.defined() ? param.grad() : given;
  if (!grad.defined()) {
    slot.view.zero_();
  } else if (grad.is_alias_of(slot.view)) {
    if (place == GradPlace::kMovedIn) {
      pack_scaled(slot.view, slot.view, divisor);
    } else {
      divide_in_place(slot.view, divisor);
    }
  } else {
    pack_scaled(grad, slot.view, divisor);
    const auto& present = param.grad();
    const bool replaced = !grad.is_same(present);
    const bool alias = place != GradPlace::kOwnMemory && place != GradPlace::kMovedOut && !replaced;
    if (alias || replaced || grad.scalar_type() != bucket.dtypes().averaged) {
      keep_for_current_stream(grad);  // write_back() drops a gradient in another dtype
    }
    if (alias) {
      alias_slot(param, slot);
    }
  }
}

void pack_all(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    std::vector<std::optional<at::Tensor>>& grads,
    const std::vector<bool>& excluded,
    GradPlace place) {
  RECORD_FUNCTION("ddpx::pack", {});
  const at::NoGradGuard no_grad;
  bucket.wait_for_streams();
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> views;
  for (const auto& slot : bucket.slots()) {
    const auto kept = std::exchange(grads[slot.param_index], std::nullopt);
    if (excluded[slot.param_index]) {
      continue;
    }
    if (!kept || !kept->defined()) {
      slot.view.zero_();
    } else if (!kept->is_alias_of(slot.view)) {
      const auto& param = params[slot.param_index];
      if (place == GradPlace::kInSlot && param.grad().is_same(*kept)) {
        alias_slot(param, slot);
      }
      views.push_back(slot.view);
      sources.push_back(*kept);
    }
  }
  if (sources.empty()) {
    return;
  }
  at::_foreach_copy_(views, sources);
  for (const auto& grad : sources) {
    keep_for_current_stream(grad);
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
    if (!copy_dense(from, to)) {
      grads.push_back(to);
      sources.push_back(from);
    }
  };
  for (const auto* slot : slots) {
    const auto& param = params[slot->param_index];
    const auto& grad = param.grad();
    if (bucket.sparse()) {
      replace_grad(param, bucket.reduced().to(bucket.dtypes().averaged));
      continue;
    }
    const auto reduced = bucket.reduced_slot(*slot);
    if (place == GradPlace::kInSlot) {
      if (!reduced.is_alias_of(slot->view)) {
        copy(reduced, slot->view);
      }
      if (!grad.defined() || !grad.is_alias_of(slot->view)) {
        alias_slot(param, *slot);
      }
    } else if (grad.defined() && grad.scalar_type() == bucket.dtypes().averaged) {
      copy(reduced, grad);
    } else {
      replace_grad(param, unpack_new(reduced, param, bucket.dtypes().averaged));
    }
  }
  if (!grads.empty()) {
    at::_foreach_copy_(grads, sources);
  }
}

void move_into_slot(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  const auto& grad = param.grad();
  if (grad.defined() && !bucket.sparse() && !find_misfit(bucket, slot, grad)) {
    slot.view.copy_(grad);
    keep_for_current_stream(grad);
    alias_slot(param, slot);
  }
}

}  // namespace ddpx
