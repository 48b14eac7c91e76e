#include "device_stream.h"

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddpx {
namespace {

// torch 2.11 cannot tell.
template <typename Stream>
auto is_captured(const Stream& stream, int /*preferred*/) -> decltype(stream.is_capturing()) {
  return stream.is_capturing();
}
template <typename Stream>
bool is_captured(const Stream& /*stream*/, long /*otherwise*/) {
  return false;
}

// The same memory without a lazy conjugate or negation. torch computes the values of a lazy tensor
// before it calls record_stream(), which would then keep the memory of these values.
at::Tensor memory_of(const at::Tensor& tensor) {
  const auto not_conj = tensor.is_conj() ? at::_conj(tensor) : tensor;
  return not_conj.is_neg() ? at::_neg_view(not_conj) : not_conj;
}

}  // namespace

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool is_capturing(c10::Device device) {
  const auto stream = current_stream(device);
  return stream && is_captured(*stream, 0);
}

void keep_for_stream(const at::Tensor& tensor, c10::Stream stream) {
  if (tensor.is_sparse()) {
    tensor._indices().record_stream(stream);
    tensor._values().record_stream(stream);
  } else {
    memory_of(tensor).record_stream(stream);
  }
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (const auto stream = current_stream(tensor.device())) {
    keep_for_stream(tensor, *stream);
  }
}

void wait_for_stream(c10::Stream waiting, c10::Stream awaited) {
  if (waiting != awaited) {
    c10::Event event(awaited.device_type());
    event.record(awaited);
    event.block(waiting);
  }
}

}  // namespace ddpx
