// Moves a gradient between `param.grad` and its slot in a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "bucket.h"

namespace ddpx {

// A gradient that its slot was not made for, in words.
struct Misfit {
  std::string gradient;
  std::string expected;
};

// Nothing if the gradient can be packed; an undefined one can.
std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& grad);

// Fills the slot from the gradient that arrived, over `divisor`; with zeros if `grad` is undefined.
// A user's hook may have put another tensor in the place of `param.grad` since.
// `as_view`: `param.grad` lies in the slot from then on, if it still is `grad`.
void pack(
    Bucket& bucket,
    const Slot& slot,
    const at::Tensor& param,
    const at::Tensor& grad,
    int divisor,
    bool as_view);

// Fills the slots of a dense bucket at once from the gradients that it holds, undivided; with zeros
// where it holds none. Slots of params that are `left_out` stay as they are.
void pack_together(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    bool as_view);

// As pack(), of `param.grad`, which stays out of the bucket: if it lies in the slot, it moves out
// first.
void pack_apart(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor);

// Fills the slot with zeros, without a look at `param.grad`. A gradient that lies in the slot moves
// out of it first.
void pack_nothing(Bucket& bucket, const Slot& slot, const at::Tensor& param);

// Gives the gradients of `params` what the all-reduce left for these slots.
void write_back(
    const Bucket& bucket,
    const std::vector<const Slot*>& slots,
    const std::vector<at::Tensor>& params,
    bool as_view);

// Moves a gradient that exists already into a slot of a new bucket, unscaled. One that does not fit
// stays where it is.
void adopt(const Bucket& bucket, const Slot& slot, const at::Tensor& param);

}  // namespace ddpx
