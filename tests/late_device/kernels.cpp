#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "memory.h"
#include "streams.h"

namespace late {
namespace {

using torch::jit::Stack;

std::atomic<int64_t> num_operations{0};
std::atomic<int64_t> num_bytes{0};

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

c10::IValue map_tensors(
    const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(map(tensor));
    }
    return list;
  }
  return value;
}

Stack map_stack(const Stack& stack, const std::function<at::Tensor(const at::Tensor&)>& map) {
  Stack mapped;
  for (const auto& value : stack) {
    mapped.push_back(map_tensors(value, map));
  }
  return mapped;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor as_host(const at::Tensor& tensor) {
  return on_device(tensor) ? host_alias(tensor) : tensor;
}

// Any operator, started in the current stream. What it returns is found out on the meta device;
// what it computes, by the CPU's kernel over the same memory, when the stream comes to it.
void run_late(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  torch::jit::drop(*stack, num_arguments);

  std::vector<at::Tensor> used;
  map_stack(arguments, [&](const at::Tensor& tensor) {
    if (on_device(tensor)) {
      used.push_back(tensor);
    }
    return tensor;
  });
  const bool writes = !schema.returns().empty() && schema.returns()[0].alias_info() != nullptr;
  at::Tensor result;
  if (writes) {
    for (std::size_t i = 0; i < num_arguments; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && arguments[i].isTensor()) {
        result = arguments[i].toTensor();
        if (schema.arguments()[i].name() == "self") {
          used.push_back(result);  // read and written
        }
      }
    }
  } else if (!schema.returns().empty()) {
    auto meta = map_stack(arguments, as_meta);
    op.callBoxed(&meta);
    const auto like = meta.at(0).toTensor();
    result =
        at::empty_strided(like.sizes(), like.strides(), like.options().device(used.at(0).device()));
    used.push_back(result);
  }
  auto host = std::make_shared<Stack>(map_stack(arguments, as_host));
  const auto target = result.defined() && !writes ? host_alias(result) : at::Tensor();
  start(used, [op, host, target] {
    auto values = *host;
    op.callBoxed(&values);
    if (target.defined()) {
      target.copy_(values.at(0).toTensor());
    }
  });
  if (result.defined()) {
    stack->push_back(result);
  }
}

void wait_for_everything() {
  for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) {
    synchronize(device);
  }
}

void fall_back(const c10::OperatorHandle& op, Stack* stack) {
  wait_for_everything();
  at::native::cpu_fallback(op, stack);
}

// ---- operators with code of their own ----------------------------------------------------------

at::Tensor empty_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const auto before = current_device();
  if (device && device->has_index()) {
    set_current_device(device->index());
  }
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto tensor = at::detail::empty_strided_generic(
      sizes, strides, &device_memory(), keys, at::dtype_or_default(dtype));
  set_current_device(before);
  return tensor;
}

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  const auto like =
      at::empty(sizes, at::TensorOptions(at::dtype_or_default(dtype)).device(at::kMeta), format);
  return empty_strided(sizes, like.strides(), dtype, layout, device, pin);
}

// As a copy between host and device: memory that is not pinned is read, or written, at once.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (on_device(from) && on_device(to)) {
    if (from.device() != to.device()) {  // the stream of the source waits for the target's
      const auto source = current_stream(from.device().index());
      const auto target = current_stream(to.device().index());
      make_wait(source, end_of(target));
      start({from, to}, [source = host_alias(from), into = host_alias(to)] { into.copy_(source); });
      make_wait(target, end_of(source));
      return to;
    }
    start({to, from}, [source = host_alias(from), into = host_alias(to)] { into.copy_(source); });
    return to;
  }
  const auto& on_host = on_device(from) ? to : from;
  const bool late = non_blocking && is_pinned(on_host.const_data_ptr());
  if (on_device(to)) {
    const auto source = late ? host_alias(from) : from.clone();
    start({to}, [source, into = host_alias(to)] { into.copy_(source); });
  } else {
    start({from}, [source = host_alias(from), into = host_alias(to)] { into.copy_(source); });
  }
  const auto stream = current_stream((on_device(from) ? from : to).device().index());
  if (late) {
    record_use(on_host.const_data_ptr(), stream);
  } else if (on_device(from)) {
    end_of(stream).wait();
  }
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return tensor.cpu().item();
}

void foreach_copy(at::TensorList into, at::TensorList from, bool) {
  std::vector<at::Tensor> used;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  for (std::size_t i = 0; i < into.size(); ++i) {
    used.insert(used.end(), {into[i], from[i]});
    targets.push_back(host_alias(into[i]));
    sources.push_back(as_host(from[i]));
  }
  start(used, [targets, sources] {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      targets[i].copy_(sources[i]);
    }
  });
}

std::vector<at::Tensor> foreach_norm(
    at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType>) {
  std::vector<at::Tensor> used(tensors.begin(), tensors.end());
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> results;
  for (const auto& tensor : tensors) {
    results.push_back(at::empty({}, tensor.options()));
    sources.push_back(host_alias(tensor));
    targets.push_back(host_alias(results.back()));
  }
  start(used, [sources, targets, order] {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      targets[i].copy_(at::_foreach_norm({sources[i]}, order).front());
    }
  });
  return results;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1)
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

const at::Tensor& resize_late(
    const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto needed = static_cast<std::size_t>(c10::multiply_integers(sizes)) * tensor.itemsize();
  const auto& storage = tensor.storage();
  if (storage.nbytes() < needed) {
    storage.set_data_ptr_noswap(device_memory().allocate(needed));  // without what was there
    storage.set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_late(to, from.sizes(), std::nullopt);
  return copy_from(from, to, /*non_blocking=*/false);
}

// Operators with one result, or one that they write, whose kernels for CPU need nothing but memory.
constexpr const char* kLateOperators[] = {
    "abs",
    "add.Tensor",
    "add_.Tensor",
    "add.out",
    "addmm",
    "addmm.out",
    "all",
    "bitwise_and.Tensor",
    "cat",
    "cos",
    "div.Tensor",
    "div_.Tensor",
    "div.out",
    "eq.Tensor",
    "eq.Scalar",
    "exp",
    "fill_.Scalar",
    "isfinite",
    "mean",
    "mean.dim",
    "mm",
    "mm.out",
    "mul.Tensor",
    "mul_.Tensor",
    "mul.out",
    "ne.Scalar",
    "ne.Tensor",
    "neg",
    "pow.Tensor_Scalar",
    "relu",
    "rsub.Scalar",
    "sin",
    "stack",
    "sub.Tensor",
    "sub_.Tensor",
    "sum",
    "sum.dim_IntList",
    "tanh",
    "tanh_backward",
    "threshold_backward",
    "zero_"};

}  // namespace

Costs costs() {
  return {num_operations, num_bytes};
}

void reset_costs() {
  num_operations = 0;
  num_bytes = 0;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()),
      tensor.sizes(),
      tensor.strides(),
      tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false));
}

void start(const std::vector<at::Tensor>& tensors, std::function<void()> task) {
  ++num_operations;
  for (const auto& tensor : tensors) {
    num_bytes += static_cast<int64_t>(tensor.numel() * tensor.itemsize());
  }
  const auto stream = current_stream(tensors.at(0).device().index());
  queue_of(stream).submit(TaskQueue::Kind::kKernel, std::move(task));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_foreach_copy_", &foreach_copy);
  library.impl("_foreach_norm.Scalar", &foreach_norm);
  library.impl("record_stream", &record_stream);
  library.impl("resize_", &resize_late);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  for (const auto* name : kLateOperators) {
    const auto schema = c10::Dispatcher::singleton().findSchema(
        {std::string("aten::") + std::string(name).substr(0, std::string(name).find('.')),
         std::string(name).find('.') == std::string::npos
             ? ""
             : std::string(name).substr(std::string(name).find('.') + 1)});
    if (schema) {
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_late>());
    }
  }
}

}  // namespace late
