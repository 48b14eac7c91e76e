// The operations of the shm backend that run through gloo.
#include <c10/util/Exception.h>

#include "gloo_work.h"
#include "shm_backend.h"

namespace ddpx {

ShmBackend::Work ShmBackend::through_gloo(
    const char* name, c10::function_ref<Work(c10d::Backend&)> start, bool collective) {
  if (collective) {
    ++sequence_;
  }
  const auto gloo = inner();
  const auto local = group();
  GlooCall call{
      name,
      collective,
      rank_,
      local,
      c10::weak_intrusive_ptr<WatchedBackend>(
          c10::intrusive_ptr<WatchedBackend>::reclaim_copy(this))};
  try {
    local->check_process();
    return c10::make_intrusive<GlooWork>(start(*gloo), call);
  } catch (const c10::Error&) {
    throw;  // the call is invalid
  } catch (const shm::Error&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));  // in a forked child
  } catch (...) {
    std::rethrow_exception(call.explain(std::current_exception()));
  }
}

ShmBackend::Work ShmBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return through_gloo(
      "all_reduce", [&](c10d::Backend& gloo) { return gloo.allreduce_sparse(tensors, options); });
}

ShmBackend::Work ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return through_gloo("all_reduce_coalesced", [&](c10d::Backend& gloo) {
    return gloo.allreduce_coalesced(tensors, options);
  });
}

ShmBackend::Work ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return through_gloo("reduce", [&](c10d::Backend& gloo) { return gloo.reduce(tensors, options); });
}

ShmBackend::Work ShmBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return through_gloo("all_gather_coalesced", [&](c10d::Backend& gloo) {
    return gloo.allgather_coalesced(outputs, inputs, options);
  });
}

ShmBackend::Work ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return through_gloo("all_gather_into_tensor_coalesced", [&](c10d::Backend& gloo) {
    return gloo.allgather_into_tensor_coalesced(outputs, inputs, options);
  });
}

ShmBackend::Work ShmBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return through_gloo(
      "gather", [&](c10d::Backend& gloo) { return gloo.gather(outputs, inputs, options); });
}

ShmBackend::Work ShmBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return through_gloo(
      "scatter", [&](c10d::Backend& gloo) { return gloo.scatter(outputs, inputs, options); });
}

ShmBackend::Work ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return through_gloo("reduce_scatter_tensor_coalesced", [&](c10d::Backend& gloo) {
    return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  });
}

ShmBackend::Work ShmBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    Sizes& output_splits,
    Sizes& input_splits,
    const c10d::AllToAllOptions& options) {
  return through_gloo("all_to_all_single", [&](c10d::Backend& gloo) {
    return gloo.alltoall_base(output, input, output_splits, input_splits, options);
  });
}

ShmBackend::Work ShmBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return through_gloo(
      "all_to_all", [&](c10d::Backend& gloo) { return gloo.alltoall(outputs, inputs, options); });
}

ShmBackend::Work ShmBackend::send(Tensors& tensors, int destination, int tag) {
  return through_gloo(
      "send",
      [&](c10d::Backend& gloo) { return gloo.send(tensors, destination, tag); },
      /*collective=*/false);
}

ShmBackend::Work ShmBackend::recv(Tensors& tensors, int source, int tag) {
  return through_gloo(
      "recv",
      [&](c10d::Backend& gloo) { return gloo.recv(tensors, source, tag); },
      /*collective=*/false);
}

ShmBackend::Work ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return through_gloo(
      "recv",
      [&](c10d::Backend& gloo) { return gloo.recvAnysource(tensors, tag); },
      /*collective=*/false);
}

}  // namespace ddpx
