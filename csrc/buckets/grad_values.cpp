#include "grad_values.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>
#include <vector>

namespace ddpx {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr auto kKeysOfWritable = kKeysOfValuesAnywhere | DispatchKeySet(
                                                             {DispatchKey::Conjugate,
                                                              DispatchKey::Negative,
                                                              DispatchKey::Python,
                                                              DispatchKey::PythonTLSSnapshot});
constexpr auto kKeysOfReadable = kKeysOfWritable | DispatchKeySet(DispatchKey::ZeroTensor);

std::optional<std::string> attempt_without_python(const std::function<void()>& work) {
  try {
    work();
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  }
}

Attempt attempt_to = attempt_without_python;

bool in_python(const at::Tensor& tensor) {
  return tensor.key_set().has(DispatchKey::Python);
}

// Whether two elements may have one address.
bool may_overlap(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense() || tensor.numel() == 0) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;  // of the dimensions with smaller strides, in elements
  for (const auto& [stride, size] : dims) {
    if (stride < extent) {
      return true;
    }
    extent += stride * (size - 1);
  }
  return false;
}

std::string layout_name(const at::Tensor& tensor) {
  if (tensor.is_nested()) {
    return "nested";
  }
  if (tensor.is_quantized()) {
    return "quantized";
  }
  if (tensor.layout() == at::kStrided || tensor.is_sparse()) {
    return tensor.is_sparse() ? "sparse" : "dense";
  }
  std::ostringstream out;
  out << tensor.layout();
  return out.str();
}

}  // namespace

// A fake tensor has the device of a real one, but its storage is on the meta device.
bool has_values(const at::Tensor& tensor) {
  if (holds_values(tensor)) {
    return true;
  }
  return kKeysOfReadable.has_all(tensor.key_set()) && tensor.layout() == at::kStrided &&
         (!tensor.has_storage() || tensor.storage().device() == tensor.device());
}

at::Tensor copy_of_values(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(tensor.scalar_type()).device(tensor.device());
  auto values = at::empty(tensor.sizes(), options);
  values.copy_(tensor);
  return values;
}

std::optional<std::string> why_no_copy(const at::Tensor& tensor) {
  return in_python(tensor) ? attempt_to([&] { copy_of_values(tensor); }) : std::nullopt;
}

bool takes_values(const at::Tensor& grad, at::IntArrayRef sizes) {
  return kKeysOfWritable.has_all(grad.key_set()) && grad.layout() == at::kStrided &&
         grad.sizes() == sizes && !grad.is_inference() && !may_overlap(grad);
}

bool overwrite(const at::Tensor& grad, const at::Tensor& values) {
  // torch's copies between float16 and float32 ignore a lazy negation.
  const auto same_dtype = values.to(grad.scalar_type());
  if (in_python(grad)) {
    return !attempt_to([&] { grad.copy_(same_dtype); });
  }
  grad.copy_(same_dtype);
  return true;
}

void set_attempt(Attempt attempt) {
  attempt_to = attempt;
}

std::string describe(const at::Tensor& tensor) {
  return describe(tensor, tensor.scalar_type());
}

std::string describe(const at::Tensor& tensor, at::ScalarType dtype) {
  std::ostringstream out;
  out << "a " << layout_name(tensor) << ' ' << dtype << " tensor";
  if (!tensor.is_nested()) {
    out << " of shape " << tensor.sizes();
  }
  out << " on " << tensor.device();
  if (tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
      !has_values(tensor)) {
    out << " without values, as under FakeTensorMode or a transform of torch.func";
  }
  return out.str();
}

}  // namespace ddpx
