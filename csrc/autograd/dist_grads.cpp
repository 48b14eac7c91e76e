#include "dist_grads.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <utility>

#include "../buckets/param_grad.h"

namespace ddpx {

using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::DistAutogradContext;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

namespace {

// Whether the script has left the context. A thread of the engine may hold the context for a moment
// longer.
bool has_ended(const DistAutogradContext& context) {
  try {
    DistAutogradContainer::getInstance().isValidContext(context.contextId());
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

}  // namespace

void DistGrads::begin(const std::vector<at::Tensor>& params) {
  active_ = true;
  set_aside_.clear();
  for (const auto& param : params) {
    set_aside_.push_back(grad_of(param));
    replace_grad(param, {});
  }
}

void DistGrads::remember_context() {
  if (const auto context = ThreadLocalDistAutogradContext::getContextPtr()) {
    context_ = context;
  }
}

void DistGrads::pull(const at::Tensor& param) {
  const auto context = context_.lock();
  if (!context) {
    return;
  }
  const auto grads = context->getGradients();
  const auto entry = grads.find(param);
  if (entry != grads.end()) {
    replace_grad(param, entry->value());
  }
}

bool DistGrads::has_any(const std::vector<at::Tensor>& params) const {
  const auto context = context_.lock();
  if (!context || has_ended(*context)) {
    return false;
  }
  const auto grads = context->getGradients();
  return std::any_of(
      params.begin(), params.end(), [&](const auto& param) { return grads.contains(param); });
}

bool DistGrads::are_averages() const {
  const auto context = context_.lock();
  return context && context == averaged_.lock();
}

void DistGrads::end(const std::vector<at::Tensor>& params, bool averaged) {
  if (!std::exchange(active_, false)) {
    return;
  }
  const auto context = context_.lock();
  if (averaged) {
    averaged_ = std::exchange(context_, {});
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor average = grad_of(params[i]);
    replace_grad(params[i], std::move(set_aside_[i]));
    if (!averaged || !context || !average.defined()) {
      continue;
    }
    auto grads = context->getGradients();  // the map itself: copies of a Dict share their entries
    grads.insert(params[i], average);      // without effect if the map has an entry
    context->runGradCallbackForVariable(params[i], [&](at::Tensor& grad) {
      grad = average;
      return true;
    });
  }
  set_aside_.clear();
}

}  // namespace ddpx
