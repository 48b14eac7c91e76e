#include "distributed_grads.h"

#include <algorithm>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {

using torch::distributed::autograd::ThreadLocalDistAutogradContext;

void DistributedGrads::pull(std::size_t param_index, const at::Tensor& param) {
  auto context = ThreadLocalDistAutogradContext::getContextPtr();
  if (!context) {
    return;
  }
  at::Tensor grad;
  context->runGradCallbackForVariable(param, [&grad](at::Tensor& in_context) {
    grad = in_context;
    return false;
  });
  const bool again = std::any_of(pulled_.begin(), pulled_.end(), [&](const Pulled& pulled) {
    return pulled.param_index == param_index;
  });
  if (!again) {
    pulled_.push_back({param_index, param, grad_of(param), std::move(context)});
  }
  replace_grad(param, std::move(grad));
}

void DistributedGrads::push_all() {
  for (auto& pulled : std::exchange(pulled_, {})) {
    pulled.context->runGradCallbackForVariable(pulled.param, [&pulled](at::Tensor& in_context) {
      in_context = grad_of(pulled.param);
      return true;
    });
    replace_grad(pulled.param, std::move(pulled.previous));
  }
}

void DistributedGrads::drop_all() {
  for (auto& pulled : std::exchange(pulled_, {})) {
    replace_grad(pulled.param, std::move(pulled.previous));
  }
}

}  // namespace ddpx
