// The operations of the shm backend that run through shared memory.
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../shm/error.h"
#include "element_type.h"
#include "shm_backend.h"

namespace ddpx {
namespace {

using Tensors = ShmBackend::Tensors;

bool same_dtype_and_size(const Tensors& tensors, const at::Tensor& like) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel() &&
           bytes_of(tensor).has_value();
  });
}

Tensors each(at::Tensor (*change)(const at::Tensor&), const Tensors& tensors) {
  Tensors changed;
  for (const auto& tensor : tensors) {
    changed.push_back(change(tensor));
  }
  return changed;
}

// Whether gloo, which connects hosts, can reduce the dtype.
bool supported_between_hosts(at::ScalarType dtype) {
  return dtype != at::kBool && dtype != at::kShort;
}

}  // namespace

ShmBackend::Work ShmBackend::through_shm(const char* phase, c10::function_ref<Work()> start) {
  try {
    return start();
  } catch (const shm::Error&) {
    // The group has failed already, or the call is invalid.
    std::rethrow_exception(as_torch_error(std::current_exception()));
  } catch (...) {
    std::rethrow_exception(fail_with_current_exception(phase));
  }
}

ShmBackend::Work ShmBackend::submit(
    shm::Call call,
    const CommonOptions& options,
    const OpInfo& info,
    Tensors inputs,
    Tensors outputs,
    Tensors results) {
  const auto local = group();
  local->check_process();
  call.timeout = options.timeout == c10d::kUnsetTimeout ? timeout() : options.timeout;
  auto work = c10::make_intrusive<ShmWork>(
      rank_,
      info.type,
      info.profiling_title,
      std::move(inputs),
      std::move(outputs),
      std::move(results),
      ++sequence_);
  if (!single_host()) {
    const auto& tensor = work->results()[0];
    between_hosts()->submit({tensor, std::move(call), info.reduce_op, work});
    return work;
  }
  const auto end = [work](std::exception_ptr error) { work->end(error); };
  if (options.async) {
    work->set_handle(local->submit(std::move(call), end));
    return work;
  }
  try {
    // The operation runs on this thread: the group's thread would take a core from a peer.
    local->run(std::move(call), end);
  } catch (...) {
    if (!work->isCompleted()) {
      throw;  // the call is invalid, and the operation was not started
    }
  }
  return work;
}

ShmBackend::Work ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto elements = tensors.size() == 1 ? elements_of(tensors[0]) : std::nullopt;
  const auto op = elements ? reduction(options.reduceOp, tensors[0]) : std::nullopt;
  if (!op || (!single_host() && !supported_between_hosts(tensors[0].scalar_type()))) {
    return through_gloo(
        "all_reduce", [&](c10d::Backend& gloo) { return gloo.allreduce(tensors, options); });
  }
  return through_shm("all_reduce", [&] {
    const auto results = each(dense, tensors);
    auto* data = results[0].mutable_data_ptr();
    return submit(
        shm::all_reduce_call(data, data, elements->count, elements->dtype, *op),
        CommonOptions(options),
        {c10d::OpType::ALLREDUCE, "shm:all_reduce", options.reduceOp},
        tensors,
        tensors,
        results);
  });
}

ShmBackend::Work ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto bytes = tensors.size() == 1 ? bytes_of(tensors[0]) : std::nullopt;
  if (!bytes || !single_host()) {
    return through_gloo(
        "broadcast", [&](c10d::Backend& gloo) { return gloo.broadcast(tensors, options); });
  }
  TORCH_CHECK(
      options.rootRank >= 0 && options.rootRank < size_,
      "broadcast: invalid root rank ",
      options.rootRank);
  const int root = topology_.local_rank_of[static_cast<std::size_t>(options.rootRank)];
  return through_shm("broadcast", [&] {
    const auto results = each(dense, tensors);
    return submit(
        shm::broadcast_call(results[0].mutable_data_ptr(), bytes->count, bytes->dtype, root),
        CommonOptions(options),
        {c10d::OpType::BROADCAST, "shm:broadcast"},
        tensors,
        tensors,
        results);
  });
}

ShmBackend::Work ShmBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const bool native = single_host() && inputs.size() == 1 && outputs.size() == 1 &&
                      outputs[0].size() == static_cast<std::size_t>(size_) && bytes_of(inputs[0]) &&
                      same_dtype_and_size(outputs[0], inputs[0]);
  if (!native) {
    return through_gloo("all_gather", [&](c10d::Backend& gloo) {
      return gloo.allgather(outputs, inputs, options);
    });
  }
  return through_shm("all_gather", [&] {
    const auto bytes = *bytes_of(inputs[0]);
    const auto sources = each(row_major, inputs);
    const auto results = each(row_major, outputs[0]);
    auto call =
        shm::all_gather_call(sources[0].const_data_ptr(), nullptr, bytes.count, bytes.dtype);
    for (const auto& result : results) {
      call.outputs.push_back(result.mutable_data_ptr());
    }
    return submit(
        std::move(call),
        CommonOptions(options),
        {c10d::OpType::ALLGATHER, "shm:all_gather"},
        sources,
        outputs[0],
        results);
  });
}

ShmBackend::Work ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  const bool native = single_host() && bytes_of(input) && bytes_of(output) &&
                      input.scalar_type() == output.scalar_type() &&
                      output.numel() == input.numel() * size_;
  if (!native) {
    return through_gloo("all_gather_into_tensor", [&](c10d::Backend& gloo) {
      return gloo._allgather_base(output, input, options);
    });
  }
  return through_shm("all_gather_into_tensor", [&] {
    const auto bytes = *bytes_of(input);
    const auto source = row_major(input);
    const auto result = row_major(output);
    return submit(
        shm::all_gather_call(
            source.const_data_ptr(), result.mutable_data_ptr(), bytes.count, bytes.dtype),
        CommonOptions(options),
        {c10d::OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor"},
        {source},
        {output},
        {result});
  });
}

ShmBackend::Work ShmBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const bool native = single_host() && outputs.size() == 1 && inputs.size() == 1 &&
                      inputs[0].size() == static_cast<std::size_t>(size_) &&
                      elements_of(outputs[0]) && reduction(options.reduceOp, outputs[0]) &&
                      same_dtype_and_size(inputs[0], outputs[0]);
  if (!native) {
    return through_gloo("reduce_scatter", [&](c10d::Backend& gloo) {
      return gloo.reduce_scatter(outputs, inputs, options);
    });
  }
  return through_shm("reduce_scatter", [&] {
    const auto elements = *elements_of(outputs[0]);
    const auto sources = each(row_major, inputs[0]);
    const auto results = each(row_major, outputs);
    auto call = shm::reduce_scatter_call(
        nullptr,
        results[0].mutable_data_ptr(),
        elements.count,
        elements.dtype,
        *reduction(options.reduceOp, outputs[0]));
    for (const auto& source : sources) {
      call.inputs.push_back(source.const_data_ptr());
    }
    return submit(
        std::move(call),
        CommonOptions(options),
        {c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter"},
        sources,
        outputs,
        results);
  });
}

ShmBackend::Work ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const bool native = single_host() && elements_of(input) && elements_of(output) &&
                      input.scalar_type() == output.scalar_type() &&
                      input.numel() == output.numel() * size_ &&
                      reduction(options.reduceOp, output);
  if (!native) {
    return through_gloo("reduce_scatter_tensor", [&](c10d::Backend& gloo) {
      return gloo._reduce_scatter_base(output, input, options);
    });
  }
  return through_shm("reduce_scatter_tensor", [&] {
    const auto elements = *elements_of(output);
    const auto source = row_major(input);
    const auto result = row_major(output);
    return submit(
        shm::reduce_scatter_call(
            source.const_data_ptr(),
            result.mutable_data_ptr(),
            elements.count,
            elements.dtype,
            *reduction(options.reduceOp, output)),
        CommonOptions(options),
        {c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor"},
        {source},
        {output},
        {result});
  });
}

ShmBackend::Work ShmBackend::barrier(const c10d::BarrierOptions& options) {
  if (!single_host()) {
    return through_gloo("barrier", [&](c10d::Backend& gloo) { return gloo.barrier(options); });
  }
  return through_shm("barrier", [&] {
    return submit(
        shm::barrier_call(),
        CommonOptions(options),
        {c10d::OpType::BARRIER, "shm:barrier"},
        {},
        {},
        {});
  });
}

}  // namespace ddpx
