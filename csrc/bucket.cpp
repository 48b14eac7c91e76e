#include "bucket.h"

#include <ATen/ops/view_as_real.h>

#include <utility>

#include "errors.h"

namespace ddpx {
namespace {

at::Tensor slot_view(const at::Tensor& buffer, int64_t offset, const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    // Same strides as the param, so that optimizers and autograd meet the layout they expect.
    return buffer.as_strided(param.sizes(), param.strides(), offset);
  }
  return buffer.narrow(0, offset, param.numel()).view(param.sizes());
}

}  // namespace

Bucket::Bucket(
    const BucketSpec& spec,
    const std::vector<at::Tensor>& params,
    bool sparse,
    Collective& collective)
    : device_(params[spec.param_indices.front()].device()), sparse_(sparse) {
  if (sparse_) {
    slots_.push_back(Slot{spec.param_indices.front(), at::Tensor()});
    return;
  }
  int64_t numel = 0;
  for (const auto param_index : spec.param_indices) {
    numel += params[param_index].numel();
  }
  const auto& first = params[spec.param_indices.front()];
  buffer_ = collective.allocate(numel, at::TensorOptions(first.scalar_type()).device(device_));
  int64_t offset = 0;
  for (const auto param_index : spec.param_indices) {
    slots_.push_back(Slot{param_index, slot_view(buffer_, offset, params[param_index])});
    offset += params[param_index].numel();
  }
}

void Bucket::begin_step() {
  num_outstanding_ = slots_.size();
}

bool Bucket::fill_one() {
  if (num_outstanding_ == 0) {
    throw InternalError("a full bucket got one more gradient");
  }
  streams_.note_pack(device_);
  return --num_outstanding_ == 0;
}

void Bucket::set_sparse(at::Tensor grad) {
  buffer_ = std::move(grad);
}

void Bucket::launch(Collective& collective) {
  streams_.join(device_);
  // Backends sum real numbers; a complex sum is the sum of its parts.
  const auto real = !sparse_ && buffer_.is_complex() ? at::view_as_real(buffer_) : buffer_;
  work_ = collective.all_reduce_sum(real);
}

void Bucket::wait() {
  // Dropped even if it throws: a work is waited for once.
  const auto work = std::exchange(work_, Collective::Work());
  if (!work) {
    throw InternalError("waiting for a bucket that was not launched");
  }
  work->wait();
}

}  // namespace ddpx
