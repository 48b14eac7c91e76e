// The operators of the device: the CPU's kernels, run later. All other operators run on the host.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "capture.h"
#include "launch.h"
#include "streams.h"

namespace late {
namespace {

using torch::jit::Stack;

// The arguments of one call, and their replacements for a kernel of the CPU.
struct Call {
  bool overwrites = false;  // the operator does not read the tensors that it writes
  std::vector<at::Tensor> read;
  std::vector<at::Tensor> written;
  Stack on_cpu;
  std::optional<c10::Device> device;
  bool possible = true;  // every tensor is on that device, or is a number
};

// A number on the host may change before the kernel runs.
at::Tensor value_of(const at::Tensor& number) {
  auto value = number.clone();
  value.unsafeGetTensorImpl()->set_wrapped_number(
      number.unsafeGetTensorImpl()->is_wrapped_number());
  return value;
}

at::Tensor take(Call& call, const c10::Argument& arg, const at::Tensor& t) {
  if (!t.defined()) {
    return t;
  }
  if (!is_late(t)) {
    call.possible = call.possible && t.device().is_cpu() && t.dim() == 0;
    if (!call.possible) {
      return {};
    }
    return value_of(t);
  }
  call.possible =
      call.possible && t.layout() == at::kStrided && call.device.value_or(t.device()) == t.device();
  if (!call.possible) {
    return {};
  }
  call.device = t.device();
  const bool is_written = arg.alias_info() != nullptr && arg.alias_info()->isWrite();
  if (is_written) {
    call.written.push_back(t);
  }
  if (!is_written || !(call.overwrites || arg.is_out())) {
    call.read.push_back(t);
  }
  return cpu_view(t);
}

bool overwrites(const std::string& name) {
  return name == "aten::zero_" || name == "aten::fill_" || name == "aten::_foreach_copy_" ||
         name == "aten::_foreach_zero_";
}

Call read_call(const c10::OperatorHandle& op, const Stack& stack) {
  Call call;
  call.overwrites = overwrites(op.operator_name().name);
  const auto& args = op.schema().arguments();
  const auto values = torch::jit::last(stack, args.size());
  for (std::size_t i = 0; i < args.size(); ++i) {
    const auto& value = values[i];
    if (value.isTensor()) {
      call.on_cpu.emplace_back(take(call, args[i], value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> on_cpu;
      for (const auto& tensor : value.toTensorVector()) {
        on_cpu.push_back(take(call, args[i], tensor));
      }
      call.on_cpu.emplace_back(std::move(on_cpu));
    } else {
      call.on_cpu.push_back(value);
    }
  }
  call.possible = call.possible && call.device.has_value();
  return call;
}

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  const HostWaitsPermitted permitted;
  for (int index = 0; index < kNumDevices; ++index) {
    synchronize_device({kType, static_cast<c10::DeviceIndex>(index)});
  }
  count(Kind::kFallback, current_device().index(), toString(op.operator_name()), 0);
  at::native::cpu_fallback(op, stack);
}

// The sizes of the results depend on values, so the host waits for the current stream, as on CUDA.
void after_current_stream(const c10::OperatorHandle& op, Stack* stack) {
  count(Kind::kFallback, current_device().index(), toString(op.operator_name()), 0);
  at::native::cpu_fallback(op, stack);  // copies the arguments to the host
}

// The results are the tensors that the operator writes to.
void queue_in_place(const c10::OperatorHandle& op, Stack* stack, Call call) {
  Stack results;
  const auto& args = op.schema().arguments();
  const auto values = torch::jit::last(*stack, args.size());
  for (std::size_t i = 0; i < args.size(); ++i) {
    const auto* alias = args[i].alias_info();
    if (alias != nullptr && alias->isWrite() && results.size() < op.schema().returns().size()) {
      results.push_back(values[i]);
    }
  }
  launch(
      op.operator_name().name.substr(6),  // without "aten::"
      current_queue(*call.device),
      call.read,
      call.written,
      [op, on_cpu = std::move(call.on_cpu)]() mutable { op.callBoxed(on_cpu); });
  torch::jit::drop(*stack, args.size());
  stack->insert(stack->end(), results.begin(), results.end());
}

at::Tensor new_like(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined()
             ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device))
             : tensor;
}

at::Tensor zeros_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()
             ? new_like(tensor, at::kCPU).zero_()
             : tensor;
}

// The operator's results for zeros of the same sizes. The meta device would give the sizes, too,
// but many of its kernels are written in Python and take a millisecond.
Stack sample_results(const c10::OperatorHandle& op, const Stack& on_cpu) {
  Stack values;
  for (const auto& value : on_cpu) {
    if (value.isTensorList()) {
      std::vector<at::Tensor> zeros;
      for (const auto& tensor : value.toTensorVector()) {
        zeros.push_back(zeros_of(tensor));
      }
      values.emplace_back(std::move(zeros));
    } else {
      values.push_back(value.isTensor() ? c10::IValue(zeros_of(value.toTensor())) : value);
    }
  }
  op.callBoxed(values);
  return values;
}

// Creates new results, with the sizes of a sample.
void queue_functional(const c10::OperatorHandle& op, Stack* stack, Call call) {
  Stack results;
  std::vector<at::Tensor> made;
  for (const auto& value : sample_results(op, call.on_cpu)) {
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& sample : value.toTensorVector()) {
        list.push_back(new_like(sample, *call.device));
      }
      made.insert(made.end(), list.begin(), list.end());
      results.emplace_back(std::move(list));
    } else {
      made.push_back(new_like(value.toTensor(), *call.device));
      results.emplace_back(made.back());
    }
  }
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> written;
  for (const auto& tensor : made) {
    targets.push_back(tensor.defined() ? cpu_view(tensor) : tensor);
    if (tensor.defined()) {
      written.push_back(tensor);
    }
  }
  launch(
      op.operator_name().name.substr(6),
      current_queue(*call.device),
      call.read,
      written,
      [op, on_cpu = std::move(call.on_cpu), targets]() mutable {
        op.callBoxed(on_cpu);
        std::size_t next = 0;
        const auto put = [&](const at::Tensor& result) {
          const auto& target = targets[next++];
          if (target.defined()) {
            target.copy_(result);
          }
        };
        for (const auto& value : on_cpu) {
          if (value.isTensorList()) {
            for (const auto& tensor : value.toTensorVector()) {
              put(tensor);
            }
          } else {
            put(value.toTensor());
          }
        }
      });
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

void on_device(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto call = read_call(op, *stack);
  if (!call.possible) {
    on_host(op, stack);
    return;
  }
  const c10::DeviceGuard guard(*call.device);
  if (call.written.empty()) {
    queue_functional(op, stack, std::move(call));
  } else {
    queue_in_place(op, stack, std::move(call));
  }
}

// The operators of the reducer, of optimizers and of small models.
constexpr const char* kOperators[] = {
    // in place
    "add_.Tensor",
    "sub_.Tensor",
    "mul_.Tensor",
    "div_.Tensor",
    "neg_",
    "sqrt_",
    "zero_",
    "fill_.Scalar",
    "fill_.Tensor",
    "addcmul_",
    "addcdiv_",
    "lerp_.Scalar",
    "relu_",
    // into a given tensor
    "mul.out",
    "div.out",
    "add.out",
    // on many tensors at once
    "_foreach_copy_",
    "_foreach_zero_",
    "_foreach_mul_.Scalar",
    "_foreach_mul_.List",
    "_foreach_mul_.Tensor",
    "_foreach_div_.Scalar",
    "_foreach_div_.List",
    "_foreach_div_.Tensor",
    "_foreach_add_.Scalar",
    "_foreach_add_.List",
    "_foreach_norm.Scalar",
    // element by element
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "neg",
    "abs",
    "sqrt",
    "eq.Scalar",
    "eq.Tensor",
    "ne.Scalar",
    "ne.Tensor",
    "ge.Scalar",
    "lt.Scalar",
    "gt.Scalar",
    "gt.Tensor",
    "logical_and",
    "logical_not",
    "pow.Tensor_Scalar",
    "relu",
    "threshold_backward",
    "tanh",
    "tanh_backward",
    "gelu",
    "gelu_backward",
    "where.self",
    "cat",
    "isin.Tensor_Tensor",
    // reductions and products
    "all",
    "any",
    "sum",
    "sum.dim_IntList",
    "mean",
    "mean.dim",
    "mm",
    "bmm",
    "addmm",
    "dot",
    "mse_loss",
    "mse_loss_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "index_select",
    "index_add_",
    "searchsorted.Tensor",
    "embedding_dense_backward",
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const auto* name : kOperators) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_device>());
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("masked_select", torch::CppFunction::makeFromBoxedFunction<&after_current_stream>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

}  // namespace
}  // namespace late
