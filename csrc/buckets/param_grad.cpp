#include "param_grad.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

namespace ddpx {
namespace {

// AccumulateGrad holds this mutex while it reads `param.grad` and adds to it.
struct Accumulator : torch::autograd::Node {
  static std::mutex& mutex_of(torch::autograd::Node& node) {
    return node.*(&Accumulator::mutex_);
  }
};

}  // namespace

void replace_grad(const at::Tensor& param, at::Tensor grad) {
  const auto accumulator = torch::autograd::impl::grad_accumulator(param);
  std::unique_lock<std::mutex> lock;
  if (accumulator) {
    lock = std::unique_lock<std::mutex>(Accumulator::mutex_of(*accumulator));
  }
  std::swap(param.mutable_grad(), grad);
  // The old gradient is freed after the lock is released.
}

void forget_grad_dtype(const at::Tensor& param) {
  auto* meta = param.unsafeGetTensorImpl()->autograd_meta();
  if (meta != nullptr) {
    auto& fields = *static_cast<torch::autograd::AutogradMeta*>(meta);
    fields.grad_dtype_.reset();
    fields.allow_grad_dtype_mismatch_ = false;
  }
}

}  // namespace ddpx
