#include "comm_hook.h"

#include <utility>
#include <vector>

#include "errors.h"

namespace ddpx {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class BuiltinHook : public CommHook {
 public:
  explicit BuiltinHook(Group group) : group_(std::move(group)) {}

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.isTensor() ? result.toTensor() : result.toTensorVector().front();
  }

 protected:
  Future mean(at::Tensor tensor) const {
    tensor.div_(group_->getSize());
    std::vector<at::Tensor> tensors = {std::move(tensor)};
    return group_->allreduce(tensors)->getFuture();
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
        [this, buffer = bucket.getBuffer()](c10::ivalue::Future& done) -> c10::IValue {
          buffer.copy_(parseHookResult(done.value()));
          return buffer;
        },
        c10::TensorType::get());
  }
};

}  // namespace

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
