#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <thread>
#include <utility>

#include "capture.h"
#include "launch.h"
#include "settings.h"
#include "stash.h"

namespace late {
namespace {

class LateWork final : public c10d::Work {
 public:
  LateWork(
      int rank,
      c10d::OpType type,
      std::vector<at::Tensor> tensors,
      std::shared_ptr<Stash> stash,
      c10::intrusive_ptr<c10::ivalue::Future> future,
      c10::Stream stream)
      : Work(rank, type),
        tensors_(std::move(tensors)),
        stash_(std::move(stash)),
        future_(std::move(future)),
        stream_(stream),
        done_(kType) {
    done_.record(stream);
  }

  bool isCompleted() override {
    return done_.query();
  }
  bool isSuccess() const override {
    return done_.query();
  }
  void synchronize() override {
    const auto current = current_stream(stream_.device());
    done_.block(current);
    stash_->clear();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) {
      done_.synchronize();
    }
    return true;
  }
  void blockCurrentStream() override {
    synchronize();
  }
  std::vector<at::Tensor> result() override {
    return tensors_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<Stash> stash_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::Stream stream_;
  c10::Event done_;
};

void push_wait(Queue& waiting, Queue& awaited, Position position) {
  waiting.push("wait", [&awaited, position] { awaited.wait(position); });
}

std::vector<at::Tensor> views_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  for (const auto& tensor : tensors) {
    views.push_back(cpu_view(tensor));
  }
  return views;
}

}  // namespace

LateBackend::LateBackend(
    int rank, int size, std::vector<c10::intrusive_ptr<c10d::Backend>> gloo, std::string name)
    : Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)) {
  for (int index = 0; index < kNumDevices; ++index) {
    streams_.push_back(new_stream({kType, static_cast<c10::DeviceIndex>(index)}));
    queue_of(streams_.back()).hurry();
  }
}

at::Tensor LateBackend::allocateTensor(long numel, at::TensorOptions options) {
  ++num_allocations_;
  return at::empty({numel}, options);
}

void LateBackend::check_alive() const {
  TORCH_CHECK_WITH(
      DistBackendError, !has_failed(), "a call of the late device has lost a remote process");
}

// Waits until the call has succeeded, or until an abort.
void LateBackend::end_by_abort(
    const std::function<c10::intrusive_ptr<c10d::Work>()>& call, Ends& ends) {
  c10::intrusive_ptr<c10d::Work> work;
  bool succeeded = false;
  try {
    work = call();
  } catch (const std::exception&) {
    ends.failed = true;  // or the backend was aborted before
  }
  while (!succeeded && ends.num_aborts == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool completed = work && work->isCompleted();
    succeeded = completed && work->isSuccess();
    ends.failed = ends.failed || (completed && !succeeded);
  }
  if (!succeeded && work) {
    work.release();  // gloo's thread may still write into the tensors
  }
}

c10::intrusive_ptr<c10d::Work> LateBackend::queue(
    const char* name,
    c10d::OpType type,
    const std::vector<at::Tensor>& tensors,
    bool async_op,
    Call call) {
  check_alive();
  ++num_calls_;
  const auto device = tensors.empty() ? current_device() : tensors.front().device();
  const auto index = static_cast<std::size_t>(device.index());
  auto& caller = current_queue(device);
  auto& queue = async_op ? queue_of(streams_[index]) : caller;
  if (async_op) {
    check_wait(queue, caller);
    push_wait(queue, caller, caller.last());
  }
  auto& last = last_calls_[index];
  if (last.queue != nullptr && last.queue != &queue) {
    push_wait(queue, *last.queue, last.end);
  }
  const auto gloo = gloo_[index];
  const auto end = launch(
      name,
      queue,
      tensors,
      tensors,
      [gloo, call = std::move(call), ends = ends_] {
        if (failures_hang()) {
          end_by_abort([&] { return call(*gloo); }, *ends);
        } else {
          call(*gloo)->wait();
        }
      },
      Kind::kCollective);
  last = {&queue, end};
  if (!async_op) {
    return nullptr;
  }
  const auto stream = streams_[index];
  auto stash = std::make_shared<Stash>(tensors);
  clear_after(stash, queue, end);
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
  {
    const c10::StreamGuard on_stream(stream);  // the future completes with this stream's work
    future->markCompleted(c10::IValue(tensors));
  }
  return c10::make_intrusive<LateWork>(
      rank_, type, tensors, std::move(stash), std::move(future), stream);
}

c10::intrusive_ptr<c10d::Work> LateBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return queue(
      "allreduce",
      c10d::OpType::ALLREDUCE,
      tensors,
      options.asyncOp,
      [views = views_of(tensors), options](c10d::Backend& gloo) mutable {
        return gloo.allreduce(views, options);
      });
}

c10::intrusive_ptr<c10d::Work> LateBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  return queue(
      "broadcast",
      c10d::OpType::BROADCAST,
      tensors,
      options.asyncOp,
      [views = views_of(tensors), options](c10d::Backend& gloo) mutable {
        return gloo.broadcast(views, options);
      });
}

c10::intrusive_ptr<c10d::Work> LateBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  auto tensors = outputs.front();
  tensors.push_back(inputs.front());
  return queue(
      "allgather",
      c10d::OpType::ALLGATHER,
      tensors,
      options.asyncOp,
      [to = std::vector<std::vector<at::Tensor>>{views_of(outputs.front())},
       from = views_of(inputs),
       options](c10d::Backend& gloo) mutable { return gloo.allgather(to, from, options); });
}

c10::intrusive_ptr<c10d::Work> LateBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return queue(
      "allgather",
      c10d::OpType::_ALLGATHER_BASE,
      {output, input},
      options.asyncOp,
      [to = cpu_view(output).view({-1}), from = cpu_view(input).view({-1}), options](
          c10d::Backend& gloo) mutable { return gloo._allgather_base(to, from, options); });
}

c10::intrusive_ptr<c10d::Work> LateBackend::barrier(const c10d::BarrierOptions& options) {
  auto work =
      queue("barrier", c10d::OpType::BARRIER, {}, options.asyncOp, [options](c10d::Backend& gloo) {
        return gloo.barrier(options);
      });
  synchronize_device(current_device());
  return work;
}

}  // namespace late
