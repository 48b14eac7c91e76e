// Where the values of a gradient are: in its memory, or to be computed by torch's operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <functional>
#include <optional>
#include <string>

namespace ddpx {

// The dispatch keys that a strided tensor may have if its memory holds its values. Another key
// stands for a fact that the memory does not show: a lazy conjugate or negation, zeros without
// memory, another layout, a subclass in Python, a transform of torch.func.
inline constexpr auto kKeysOfValues = c10::DispatchKeySet(
                                          {c10::DispatchKey::Dense,
                                           c10::DispatchKey::ADInplaceOrView,
                                           c10::DispatchKey::AutogradFunctionality,
                                           c10::DispatchKey::AutogradOther}) |
                                      c10::autocast_dispatch_keyset;
inline constexpr auto kKeysOfValuesOnCpu =
    kKeysOfValues | c10::DispatchKeySet(c10::BackendComponent::CPUBit);
inline constexpr auto kKeysOfValuesAnywhere =
    kKeysOfValues | c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);

// Whether the memory of the tensor holds its values, by its strides.
inline bool holds_values(const at::Tensor& tensor) {
  return kKeysOfValuesAnywhere.has_all(tensor.key_set());
}

// As holds_values(), in memory that the host can read.
inline bool holds_values_on_cpu(const at::Tensor& tensor) {
  return kKeysOfValuesOnCpu.has_all(tensor.key_set());
}

// Whether the tensor holds its values, or copy_of_values() gives them.
bool has_values(const at::Tensor& tensor);

// A new tensor that holds the values of a tensor with has_values(). Throws what an operator of a
// subclass in Python raises.
at::Tensor copy_of_values(const at::Tensor& tensor);

// The text of what copy_of_values() throws; nullopt if it throws nothing. Only a subclass in Python
// raises.
std::optional<std::string> why_no_copy(const at::Tensor& tensor);

// Whether the tensors have one storage. False for a layout that has no storage.
inline bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  // Not has_storage() and storage(), two virtual calls for each tensor.
  const c10::Storage& first = a.unsafeGetTensorImpl()->unsafe_storage();
  const c10::Storage& second = b.unsafeGetTensorImpl()->unsafe_storage();
  return first && second && first.is_alias_of(second);
}

// Whether `grad` can take any values of these sizes in place. False for another layout, for a
// tensor that torch does not change in place, and for one with several elements at one address.
bool takes_values(const at::Tensor& grad, at::IntArrayRef sizes);

// grad = values, for a gradient with takes_values(). Returns false if a subclass in Python refuses.
bool overwrite(const at::Tensor& grad, const at::Tensor& values);

// Calls `work`, and returns the text of its exception; nullopt if there is none. An exception of
// Python leaves an error in the interpreter, too. The bindings set a function that removes it.
using Attempt = std::optional<std::string> (*)(const std::function<void()>& work);
void set_attempt(Attempt attempt);

// The tensor in words: layout, dtype, shape and device. The second form names another dtype.
std::string describe(const at::Tensor& tensor);
std::string describe(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace ddpx
