#include "builtin_hooks.h"

#include <functional>
#include <utility>
#include <vector>

#include "../errors.h"

namespace ddpx {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Run = std::function<Future(c10d::ProcessGroup& group, at::Tensor buffer)>;

class BuiltinHook final : public CommHook {
 public:
  BuiltinHook(Group group, Run run) : group_(std::move(group)), run_(std::move(run)) {}

  Future runHook(c10d::GradBucket& bucket) override {
    return run_(*group_, bucket.getBuffer());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_in(result);
  }

 private:
  Group group_;
  Run run_;
};

// A future may outlive its hook, because a failed step waits for nothing. So the callbacks below
// capture neither the hook nor the group.

Future sum(c10d::ProcessGroup& group, at::Tensor tensor) {
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  return group.allreduce(tensors)->getFuture();
}

Future mean(c10d::ProcessGroup& group, at::Tensor tensor) {
  tensor.div_(group.getSize());
  return sum(group, std::move(tensor));
}

Future mean_in_half(c10d::ProcessGroup& group, const at::Tensor& buffer) {
  return mean(group, buffer.to(at::kHalf))
      ->then(
          [buffer](c10::ivalue::Future& done) -> c10::IValue {
            buffer.copy_(tensor_in(done.value()));
            return buffer;
          },
          c10::TensorType::get());
}

Future mean_after_sum(c10d::ProcessGroup& group, at::Tensor tensor) {
  return sum(group, std::move(tensor))
      ->then(
          [world_size = group.getSize()](c10::ivalue::Future& done) -> c10::IValue {
            return tensor_in(done.value()).div_(world_size);  // write_back() casts it
          },
          c10::TensorType::get());
}

}  // namespace

std::shared_ptr<CommHook> make_reduced_precision_hook(
    at::ScalarType dtype, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_shared<BuiltinHook>(
      std::move(group), [dtype](c10d::ProcessGroup& over, const at::Tensor& buffer) {
        return mean_after_sum(over, buffer.to(dtype));
      });
}

std::shared_ptr<CommHook> make_builtin_hook(
    c10d::BuiltinCommHookType type, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  switch (type) {
    case c10d::BuiltinCommHookType::ALLREDUCE:
      return std::make_shared<BuiltinHook>(std::move(group), mean);
    case c10d::BuiltinCommHookType::FP16_COMPRESS:
      return std::make_shared<BuiltinHook>(std::move(group), mean_in_half);
  }
  throw InternalError("an unknown built-in communication hook");
}

}  // namespace ddpx
