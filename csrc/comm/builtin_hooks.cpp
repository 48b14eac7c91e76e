#include "builtin_hooks.h"

#include <utility>
#include <vector>

#include "../errors.h"

namespace ddpx {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// A future may outlive its hook, because a failed step waits for nothing. So callbacks do not
// capture `this`.
class BuiltinHook : public CommHook {
 public:
  explicit BuiltinHook(Group group) : group_(std::move(group)) {}

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_in(result);
  }

 protected:
  Future sum(at::Tensor tensor) const {
    std::vector<at::Tensor> tensors = {std::move(tensor)};
    return group_->allreduce(tensors)->getFuture();
  }

  Future mean(at::Tensor tensor) const {
    tensor.div_(world_size());
    return sum(std::move(tensor));
  }

  int world_size() const {
    return group_->getSize();
  }

 private:
  Group group_;
};

class AllReduceHook final : public BuiltinHook {
 public:
  using BuiltinHook::BuiltinHook;

  Future runHook(c10d::GradBucket& bucket) override {
    return mean(bucket.getBuffer());
  }
};

class Fp16CompressHook final : public BuiltinHook {
 public:
  using BuiltinHook::BuiltinHook;

  Future runHook(c10d::GradBucket& bucket) override {
    auto reduced = mean(bucket.getBuffer().to(at::kHalf));
    return reduced->then(
        [buffer = bucket.getBuffer()](c10::ivalue::Future& done) -> c10::IValue {
          buffer.copy_(tensor_in(done.value()));
          return buffer;
        },
        c10::TensorType::get());
  }
};

class ReducedPrecisionHook final : public BuiltinHook {
 public:
  ReducedPrecisionHook(at::ScalarType dtype, Group group)
      : BuiltinHook(std::move(group)), dtype_(dtype) {}

  Future runHook(c10d::GradBucket& bucket) override {
    return sum(bucket.getBuffer().to(dtype_))
        ->then(
            [world_size = world_size()](c10::ivalue::Future& done) -> c10::IValue {
              return tensor_in(done.value()).div_(world_size);  // write_back() casts it
            },
            c10::TensorType::get());
  }

 private:
  at::ScalarType dtype_;
};

}  // namespace

std::shared_ptr<CommHook> make_reduced_precision_hook(
    at::ScalarType dtype, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_shared<ReducedPrecisionHook>(dtype, std::move(group));
}

std::shared_ptr<CommHook> make_builtin_hook(
    c10d::BuiltinCommHookType type, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  switch (type) {
    case c10d::BuiltinCommHookType::ALLREDUCE:
      return std::make_shared<AllReduceHook>(std::move(group));
    case c10d::BuiltinCommHookType::FP16_COMPRESS:
      return std::make_shared<Fp16CompressHook>(std::move(group));
  }
  throw InternalError("an unknown built-in communication hook");
}

}  // namespace ddpx
