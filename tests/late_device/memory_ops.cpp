// Operators that create tensors, view them, and move memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "allocator.h"
#include "launch.h"
#include "streams.h"

namespace late {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> /*pin_memory*/,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "late has dense tensors only");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pin_memory*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self,
    at::IntArrayRef sizes,
    std::optional<at::MemoryFormat> /*memory_format*/) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto num_bytes = at::detail::computeStorageNbytesContiguous(
      sizes, self.element_size(), static_cast<std::size_t>(self.storage_offset()));
  if (self.storage().nbytes() < num_bytes) {
    resize_storage(self.storage(), num_bytes);
  }
  return self;
}

// Both streams wait for each other, as in CUDA's copies between devices.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto& source = current_queue(from.device());
  auto& target = current_queue(to.device());
  const auto ready = target.last();
  source.push("wait", [&target, ready] { target.wait(ready); });
  const auto copied =
      launch("copy_", source, {from}, {to}, [to = cpu_view(to), from = cpu_view(from)] {
        to.copy_(from);
      });
  target.push("wait", [&source, copied] { source.wait(copied); });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  if (is_late(from) && is_late(to) && from.device() != to.device()) {
    copy_between_devices(from, to);
    return to;
  }
  const auto stream = current_stream(is_late(from) ? from.device() : to.device());
  auto& queue = queue_of(stream);
  const auto& host = is_late(from) ? to : from;
  const bool on_device = is_late(host);
  const bool pinned = !on_device && is_pinned(host.const_data_ptr());
  // Pageable memory is copied to a staging buffer before the call returns.
  const auto source = is_late(from) ? cpu_view(from) : pinned ? cpu_view(from) : from.clone();
  const auto target = is_late(to) || pinned ? cpu_view(to) : to;
  launch("copy_", queue, {from}, {to}, [source, target] { target.copy_(source); });
  if (!on_device && !(non_blocking && (pinned || is_late(to)))) {
    synchronize_stream(stream);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    to.resize_(from.sizes());
  }
  return to.copy_(from);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize_stream(current_stream(self.device()));
  return cpu_view(self).item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", set_tensor);
}

}  // namespace
}  // namespace late
