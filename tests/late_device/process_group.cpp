#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <utility>

#include "ignored_waits.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

namespace late {
namespace {

class LateWork final : public c10d::Work {
 public:
  LateWork(
      int rank, c10d::OpType type, Point end, c10::Stream stream, std::vector<at::Tensor> results)
      : Work(rank, type), end_(end), device_(stream.device()), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    const c10::StreamGuard guard(stream);  // the future is done when this stream has come by
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override {
    return end_.passed();
  }
  bool isSuccess() const override {
    return end_.passed();
  }
  bool wait(std::chrono::milliseconds) override {
    if (!is_ignored()) {
      make_wait(current_stream(device_.index()), end_);
    }
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Point end_;
  c10::Device device_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::vector<at::Tensor> host_aliases(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const auto& tensor : tensors) {
    aliases.push_back(host_alias(tensor));
  }
  return aliases;
}

}  // namespace

LateBackend::LateBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner)
    : Backend(rank, size), inner_(std::move(inner)) {}

c10::Stream LateBackend::stream_for(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_calls_;
  const auto found = streams_.find(device);
  return found != streams_.end() ? found->second
                                 : streams_.emplace(device, new_stream(device)).first->second;
}

c10::intrusive_ptr<c10d::Work> LateBackend::start(
    c10d::OpType type, const std::vector<at::Tensor>& tensors, std::function<void()> call) {
  const auto device = tensors.at(0).device().index();
  const auto stream = stream_for(device);
  make_wait(stream, end_of(current_stream(device)));
  for (const auto& tensor : tensors) {
    record_use(tensor.const_data_ptr(), stream);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  make_wait(stream, last_);  // of another device: gloo pairs calls by their order
  auto& queue = queue_of(stream);
  last_ = {&queue, queue.submit(TaskQueue::Kind::kKernel, std::move(call))};
  queue.demand(last_.number);  // peers wait for it
  return c10::make_intrusive<LateWork>(getRank(), type, last_, stream, tensors);
}

c10::intrusive_ptr<c10d::Work> LateBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  auto aliases = host_aliases(tensors);
  return start(c10d::OpType::ALLREDUCE, tensors, [inner = inner_, aliases, options]() mutable {
    inner->allreduce(aliases, options)->wait();
  });
}

c10::intrusive_ptr<c10d::Work> LateBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  auto aliases = host_aliases(tensors);
  return start(c10d::OpType::BROADCAST, tensors, [inner = inner_, aliases, options]() mutable {
    inner->broadcast(aliases, options)->wait();
  });
}

c10::intrusive_ptr<c10d::Work> LateBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> tensors = outputs.at(0);
  tensors.push_back(inputs.at(0));
  std::vector<std::vector<at::Tensor>> results = {host_aliases(outputs.at(0))};
  auto sources = host_aliases(inputs);
  return start(
      c10d::OpType::ALLGATHER, tensors, [inner = inner_, results, sources, options]() mutable {
        inner->allgather(results, sources, options)->wait();
      });
}

c10::intrusive_ptr<c10d::Work> LateBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return start(
      c10d::OpType::_ALLGATHER_BASE,
      {output, input},
      [inner = inner_, result = host_alias(output), source = host_alias(input), options]() mutable {
        inner->_allgather_base(result, source, options)->wait();
      });
}

c10::intrusive_ptr<c10d::Work> LateBackend::barrier(const c10d::BarrierOptions& options) {
  for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) {
    synchronize(device);
  }
  return inner_->barrier(options);
}

}  // namespace late
