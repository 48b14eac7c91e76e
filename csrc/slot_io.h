// Moves a gradient between `param.grad` and its slot in a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "bucket.h"

namespace ddpx {

// A gradient that its slot was not made for, in words.
struct Misfit {
  std::string gradient;
  std::string expected;
};

// Nothing if `param.grad` can be packed; a missing gradient can.
std::optional<Misfit> find_misfit(const Bucket& bucket, const Slot& slot, const at::Tensor& param);

// Fills the slot from `param.grad`, scaled by 1 / world size; with zeros if there is no gradient.
// `as_view`: `param.grad` lies in the slot from then on.
void pack(Bucket& bucket, const Slot& slot, const at::Tensor& param, int world_size, bool as_view);

// Gives `param.grad` what the all-reduce left in the slot.
void write_back(const Bucket& bucket, const Slot& slot, const at::Tensor& param, bool as_view);

// Moves a gradient that exists already into a slot of a new bucket, unscaled. One that does not fit
// stays where it is.
void adopt(const Bucket& bucket, const Slot& slot, const at::Tensor& param);

}  // namespace ddpx
