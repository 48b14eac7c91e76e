#include "collective.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

namespace ddpx {
namespace {

// DDP's own switch against registered communication memory; honoured so that it works here too.
bool communication_memory_disabled() {
  const char* value = std::getenv("DDP_DISABLE_COMM_MEM");
  return value != nullptr && std::string_view(value) == "1";
}

// So that one rank can walk the whole path, in tests and on a single GPU.
bool communication_forced() {
  const char* value = std::getenv("DDPX_FORCE_COMM");
  return value != nullptr && std::string_view(value) == "1";
}

class ProcessGroupCollective final : public Collective {
 public:
  explicit ProcessGroupCollective(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)), alone_(group_->getSize() == 1 && !communication_forced()) {}

  int rank() const override {
    return group_->getRank();
  }

  int world_size() const override {
    return group_->getSize();
  }

  bool alone() const override {
    return alone_;
  }

  Work all_reduce_sum(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors = {tensor};
    return group_->allreduce(tensors);
  }

  void broadcast_from_rank_0(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors = {tensor};
    group_->broadcast(tensors)->wait();
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    if (!communication_memory_disabled()) {
      if (const auto backend = backend_for(options.device().type())) {
        if (backend->supportsTensorAlloc(options.device().index())) {
          return backend->allocateTensor(static_cast<long>(numel), options);
        }
      }
    }
    return at::empty({numel}, options);
  }

 private:
  // Null if the group has none, as a group written in Python may not.
  c10::intrusive_ptr<c10d::Backend> backend_for(c10::DeviceType type) const {
    try {
      return group_->getBackend(type);
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool alone_;
};

}  // namespace

std::shared_ptr<Collective> make_collective(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_shared<ProcessGroupCollective>(std::move(group));
}

}  // namespace ddpx
