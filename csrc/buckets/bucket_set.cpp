#include "bucket_set.h"

#include <ATen/ops/zeros_like.h>

#include "normal_tensors.h"
#include "packing.h"
#include "param_grad.h"

namespace ddpx {
namespace {

// A sparse gradient has no memory of its own, but tensors.
bool shares_memory(const at::Tensor& grad, const Slot& slot) {
  return grad.defined() && grad.has_storage() && grad.is_alias_of(slot.view);
}

// Each gradient that lies in the bucket becomes make(gradient), in other memory.
template <typename Function>
void replace_grads(
    const Bucket& bucket, const std::vector<at::Tensor>& params, const Function& make) {
  const NormalTensors normal;
  for (const auto& slot : bucket.slots()) {
    const auto& param = params[slot.param_index];
    if (shares_memory(grad_of(param), slot)) {
      replace_grad(param, make(grad_of(param)));
    }
  }
}

}  // namespace

void BucketSet::install(BucketPlan plan, std::vector<Bucket> buckets) {
  keep_for_streams();
  plan_ = std::move(plan);
  buckets_ = std::move(buckets);
}

void BucketSet::keep_for_streams() const {
  for (const auto& bucket : buckets_) {
    bucket.keep_for_streams();
  }
}

void BucketSet::free_memory() {
  for (auto& bucket : buckets_) {
    bucket.free_memory();
  }
}

void BucketSet::move_out_grads(const std::vector<at::Tensor>& params) {
  for (const auto& bucket : buckets_) {
    if (bucket.can_hold_grads() && bucket.has_memory()) {
      replace_grads(bucket, params, [](const at::Tensor& grad) { return grad.clone(); });
    }
  }
}

void BucketSet::take_grads(const std::vector<at::Tensor>& params) {
  for (const auto& bucket : buckets_) {
    if (!bucket.can_hold_grads() || !bucket.has_memory()) {
      continue;
    }
    for (const auto& slot : bucket.slots()) {
      move_into_slot(bucket, slot, params[slot.param_index]);
    }
  }
}

void BucketSet::clear_in_flight(const std::vector<at::Tensor>& params) {
  for (const auto& bucket : buckets_) {
    if (bucket.can_hold_grads() && bucket.in_flight()) {
      replace_grads(bucket, params, [](const at::Tensor& grad) { return at::zeros_like(grad); });
    }
  }
}

void BucketSet::forget_streams() {
  for (auto& bucket : buckets_) {
    bucket.forget_streams();
  }
}

void BucketSet::drop_captured() {
  for (auto& bucket : buckets_) {
    bucket.drop_captured();
  }
}

void BucketSet::wait_for_streams() {
  for (auto& bucket : buckets_) {
    bucket.wait_for_streams();
    bucket.add_stream();
  }
}

}  // namespace ddpx
