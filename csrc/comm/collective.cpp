#include "collective.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "../health_c10d/group_monitor.h"
#include "end_notice.h"

namespace ddpx {
namespace {

// DDP's switch against registered communication memory. ddpx obeys it, too.
bool communication_memory_disabled() {
  return c10::utils::get_env("DDP_DISABLE_COMM_MEM") == "1";
}

// For tests and measurements of the whole path with one rank.
bool communication_forced() {
  return c10::utils::get_env("DDPX_FORCE_COMM") == "1";
}

// Poll interval for group failure while waiting.
constexpr auto kPollInterval = std::chrono::milliseconds(200);

void throw_if_failed(const health::Monitor& monitor) {
  if (monitor.failed()) {
    throw health::GroupFailed();
  }
}

// Null if the group has no backend for the device type, which is possible for a group in Python.
c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

class ProcessGroupCollective final : public Collective {
 public:
  ProcessGroupCollective(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      WrittenIn language,
      c10::intrusive_ptr<c10d::Backend> transport)
      : group_(std::move(group)),
        transport_(std::move(transport)),
        language_(language),
        alone_(language == WrittenIn::kCpp && group_->getSize() == 1 && !communication_forced()),
        monitor_(monitor_of(group_)),
        needs_abort_polling_(
            language == WrittenIn::kCpp && needs_abort_polling(*group_, c10::kCPU)) {
    if (transport_) {
      abort_with(group_, transport_);
    }
  }

  int rank() const override {
    return group_->getRank();
  }

  int world_size() const override {
    return group_->getSize();
  }

  bool alone() const override {
    return alone_;
  }

  bool sums_by_group() const override {
    return !transport_;
  }

  Work all_reduce_sum(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors = {tensor};
    if (!transport_ || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      return group_->allreduce(tensors);
    }
    c10d::AllreduceOptions options;
    // Read in each call, because the timeout of a group may change.
    options.timeout = group_->getBackend(c10::kCPU)->getBackendOptions()->timeout;
    return transport_->allreduce(tensors, options);
  }

  // DDP takes the value of the future. Backends in C++ write the sum into the tensor, too. A work
  // in Python may have no future: DDP then fails.
  c10::intrusive_ptr<c10::ivalue::Future> sum_of(c10d::Work& work) override {
    if (language_ == WrittenIn::kCpp) {
      return nullptr;
    }
    try {
      return work.getFuture();
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  void broadcast_from_rank_0(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors = {tensor};
    wait(*group_->broadcast(tensors), tensor.device());
  }

  void wait(c10d::Work& work, c10::Device device) override {
    const bool ends_by_abort = transport_ && dynamic_cast<GivesEndNotice*>(&work) != nullptr;
    if (!monitor_ || !needs_abort_polling_ || !device.is_cpu() || ends_by_abort) {
      work.wait();
      return;
    }
    while (true) {
      try {
        work.wait(kPollInterval);
        return;
      } catch (...) {
        if (work.isCompleted()) {
          work.wait();  // throws the error of the work, if any
          return;
        }
      }
      throw_if_failed(*monitor_);
    }
  }

  void wait(c10::ivalue::Future& future) const override {
    if (!monitor_ || future.completed()) {
      future.waitAndThrow();
      return;
    }
    struct Latch {
      std::mutex mutex;
      std::condition_variable opened;
      bool open = false;
    };
    const auto latch = std::make_shared<Latch>();
    future.addCallback([latch](c10::ivalue::Future&) {
      {
        const std::lock_guard<std::mutex> lock(latch->mutex);
        latch->open = true;
      }
      latch->opened.notify_all();
    });
    std::unique_lock<std::mutex> lock(latch->mutex);
    while (!latch->opened.wait_for(lock, kPollInterval, [&] { return latch->open; })) {
      throw_if_failed(*monitor_);
    }
    future.waitAndThrow();
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    if (!communication_memory_disabled()) {
      if (const auto backend = backend_for(*group_, options.device().type())) {
        if (backend->supportsTensorAlloc(options.device().index())) {
          return backend->allocateTensor(static_cast<long>(numel), options);
        }
      }
    }
    return at::empty({numel}, options);
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> transport_;
  WrittenIn language_;
  bool alone_;
  std::shared_ptr<health::Monitor> monitor_;
  bool needs_abort_polling_;
};

}  // namespace

void Collective::wait(c10d::Work& work, c10::Device) {
  work.wait();
}

void Collective::wait(c10::ivalue::Future& future) const {
  future.waitAndThrow();
}

bool needs_abort_polling(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto backend = device == c10::kCPU ? backend_for(group, device) : nullptr;
  return backend && backend->getBackendName() == "gloo";
}

std::shared_ptr<Collective> make_collective(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    WrittenIn language,
    c10::intrusive_ptr<c10d::Backend> transport) {
  return std::make_shared<ProcessGroupCollective>(std::move(group), language, std::move(transport));
}

}  // namespace ddpx
