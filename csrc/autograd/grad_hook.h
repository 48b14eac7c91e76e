// RAII handle of one hook on one grad accumulator.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ddpx {

// Called on the engine thread that accumulated the gradient, without the GIL, once `param.grad`
// holds it.
class GradListener {
 public:
  virtual ~GradListener() = default;
  virtual void on_grad(std::size_t param_index) = 0;

  // The gradient is about to be accumulated, or returned by autograd.grad(). Only for params of
  // which GradHook::announce() was called.
  virtual void on_grad_to_come(std::size_t param_index) = 0;
};

// While it lives, each accumulation into `param.grad` calls the listener, unless that is gone.
// Keeps the accumulator alive (a param only refers to it weakly), which keeps the hook on it.
// The engine walks an accumulator's hooks while it runs them, so a GradHook may only be destroyed
// while no backward runs; abandon() it otherwise.
class GradHook {
 public:
  GradHook(const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener);
  ~GradHook();
  GradHook(GradHook&& other) noexcept;
  GradHook(const GradHook&) = delete;
  GradHook& operator=(const GradHook&) = delete;
  GradHook& operator=(GradHook&& other) noexcept;

  // Whether a backward from now on reaches this hook. Not so once the param's dtype or device was
  // changed: torch then drops its accumulator.
  bool attached_to(const at::Tensor& param) const;

  // The listener is told before each gradient of `param`, too. To be called before each backward
  // for which that matters: torch drops such hooks when the user registers the first one.
  static void announce(
      const at::Tensor& param, std::size_t param_index, std::weak_ptr<GradListener> listener);

  // The node that a graph ends in where it reaches the param.
  const torch::autograd::Node* accumulator() const {
    return accumulator_.get();
  }

  // Leaves the hook where it is: without effect once the listener is gone, and freed with the
  // accumulator.
  void abandon() noexcept {
    accumulator_ = nullptr;
  }

 private:
  // The pointer's type changed between torch releases, so it is not spelled.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator_;
  std::uintptr_t key_;
};

}  // namespace ddpx
