#include "slot_io.h"

#include <c10/core/GradMode.h>

#include <sstream>

#include "grad_copy.h"

namespace ddpx {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream out;
  out << (tensor.is_sparse() ? "a sparse " : "a dense ") << tensor.scalar_type()
      << " tensor of shape " << tensor.sizes() << " on " << tensor.device();
  return out.str();
}

}  // namespace

std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const auto& grad = param.grad();
  if (!grad.defined()) {
    return std::nullopt;
  }
  if (bucket.sparse()) {
    return grad.is_sparse() ? std::nullopt
                            : std::optional(Misfit{describe(grad), "a sparse gradient"});
  }
  const bool fits = !grad.is_sparse() && grad.scalar_type() == slot.view.scalar_type() &&
                    grad.device() == slot.view.device() && grad.sizes() == slot.view.sizes();
  return fits ? std::nullopt : std::optional(Misfit{describe(grad), describe(slot.view)});
}

void pack(Bucket& bucket, const Slot& slot, const at::Tensor& param, int world_size, bool as_view) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (bucket.sparse()) {
    bucket.set_sparse(grad.defined() ? divide_sparse(grad, world_size) : empty_sparse_grad(param));
  } else if (!grad.defined()) {
    slot.view.zero_();
  } else if (grad.is_alias_of(slot.view)) {
    divide_in_place(slot.view, world_size);
  } else {
    pack_scaled(grad, slot.view, world_size);
    if (as_view) {
      grad = slot.view;
    }
  }
}

void write_back(const Bucket& bucket, const Slot& slot, const at::Tensor& param, bool as_view) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (bucket.sparse()) {
    grad = bucket.buffer();
  } else if (as_view) {
    if (!grad.defined() || !grad.is_alias_of(slot.view)) {
      grad = slot.view;
    }
  } else if (grad.defined()) {
    grad.copy_(slot.view);
  } else {
    grad = unpack_new(slot.view, param);
  }
}

void adopt(const Bucket& bucket, const Slot& slot, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  auto& grad = param.mutable_grad();
  if (grad.defined() && !bucket.sparse() && !find_misfit(bucket, slot, param)) {
    slot.view.copy_(grad);
    grad = slot.view;
  }
}

}  // namespace ddpx
