// RAII handle of one hook on one grad accumulator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace ddpx {

// Called on the engine thread that accumulated the gradient, without the GIL, once `param.grad`
// holds it.
class GradListener {
 public:
  virtual ~GradListener() = default;
  virtual void on_grad(std::size_t param_index) = 0;

  // The gradient is about to be accumulated, or returned by autograd.grad(). Called only for params
  // of GradHook::add_pre_hook().
  virtual void on_grad_to_come(std::size_t param_index) = 0;
};

// During the lifetime of a GradHook, each accumulation into `param.grad` calls the listener, if the
// listener is alive. The GradHook keeps the accumulator alive, to which a param refers only weakly.
// The engine walks the list of hooks while it runs them. So a GradHook may only be destroyed while
// no backward runs; otherwise call abandon().
class GradHook {
 public:
  GradHook(const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener);
  ~GradHook();
  GradHook(GradHook&& other) noexcept = default;
  GradHook(const GradHook&) = delete;
  GradHook& operator=(const GradHook&) = delete;
  GradHook& operator=(GradHook&& other) noexcept;

  // Whether later backwards reach this hook. False once the dtype or device of the param changed:
  // torch then drops the accumulator.
  bool attached_to(const at::Tensor& param) const;

  // Calls the listener before each gradient of `param`, too. To be called before each backward that
  // needs it: torch drops such hooks when the user registers the first hook.
  static void add_pre_hook(
      const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener);

  // The node at which a graph ends when it reaches the param.
  const torch::autograd::Node* accumulator() const {
    return accumulator_.get();
  }

  // The stream on which autograd adds to the gradient and calls the listener; nullopt for CPU, and
  // after abandon().
  std::optional<c10::Stream> stream() const;

  // Leaves the hook on the accumulator. The hook has no effect once the listener is gone, and is
  // destroyed with the accumulator.
  void abandon() noexcept {
    accumulator_ = nullptr;
  }

 private:
  // decltype, because the type of the pointer changed between torch releases.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator_;
  std::uintptr_t key_;
};

}  // namespace ddpx
