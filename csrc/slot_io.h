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

// Nothing if `param.grad` can be packed; a missing gradient can.
std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& param);

// Fills the slot from `param.grad`, over `divisor`; with zeros if there is no gradient.
// `as_view`: `param.grad` lies in the slot from then on.
void pack(Bucket& bucket, const Slot& slot, const at::Tensor& param, int divisor, bool as_view);

// Fills the slots of a dense bucket at once from the gradients that it holds, undivided; with zeros
// where it holds none. Slots of params that are `left_out` stay as they are.
void pack_together(
    Bucket& bucket,
    const std::vector<at::Tensor>& params,
    const std::vector<bool>& left_out,
    bool as_view);

// As pack(), for a gradient that stays out of the bucket: if it lies in the slot, it moves out
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
