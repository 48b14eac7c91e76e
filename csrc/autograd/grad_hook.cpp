#include "grad_hook.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "node_hook.h"

namespace ddpx {
namespace {

using torch::autograd::variable_list;

class ArrivalHook final : public NodeHook<torch::autograd::FunctionPostHook> {
 public:
  ArrivalHook(std::size_t param_index, std::weak_ptr<GradListener> listener)
      : param_index_(param_index), listener_(std::move(listener)) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto listener = listener_.lock()) {
      listener->on_grad(param_index_);
    }
    return outputs;  // an accumulator has no outputs
  }

 private:
  std::size_t param_index_;
  std::weak_ptr<GradListener> listener_;
};

class BeforeGradHook final : public NodeHook<torch::autograd::FunctionPreHook> {
 public:
  BeforeGradHook(std::size_t param_index, std::weak_ptr<GradListener> listener)
      : param_index_(param_index), listener_(std::move(listener)) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto listener = listener_.lock()) {
      listener->on_grad_to_come(param_index_);
    }
    return grads;
  }

  bool tells(const std::weak_ptr<GradListener>& listener) const {
    return !listener_.owner_before(listener) && !listener.owner_before(listener_);
  }

 private:
  std::size_t param_index_;
  std::weak_ptr<GradListener> listener_;
};

}  // namespace

GradHook::GradHook(
    const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener)
    : accumulator_(torch::autograd::impl::grad_accumulator(param)),
      key_(accumulator_->add_post_hook(
          std::make_unique<ArrivalHook>(param_index, std::move(listener)))) {}

GradHook& GradHook::operator=(GradHook&& other) noexcept {
  std::swap(accumulator_, other.accumulator_);
  std::swap(key_, other.key_);
  return *this;
}

// The accumulator calls the hooks of its param, not the hooks in its own list.
void GradHook::add_pre_hook(
    const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener) {
  auto& present = torch::autograd::impl::hooks(param);
  const bool hooked = std::any_of(present.begin(), present.end(), [&](const auto& hook) {
    const auto* before_grad = dynamic_cast<const BeforeGradHook*>(hook.get());
    return before_grad != nullptr && before_grad->tells(listener);
  });
  if (!hooked) {
    present.push_back(std::make_unique<BeforeGradHook>(param_index, std::move(listener)));
  }
}

bool GradHook::attached_to(const at::Tensor& param) const {
  return torch::autograd::impl::try_get_grad_accumulator(param) == accumulator_;
}

std::optional<c10::Stream> GradHook::stream() const {
  return accumulator_ ? accumulator_->stream() : std::nullopt;
}

GradHook::~GradHook() {
  if (accumulator_) {
    accumulator_->del_post_hook(key_);
  }
}

}  // namespace ddpx
