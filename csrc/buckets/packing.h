// Moves gradients between `param.grad` and the slots of a bucket.
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

// nullopt if the gradient can be packed. An undefined gradient can be packed.
std::optional<Misfit> find_misfit(
    const GradBuffer& buffer, const Slot& slot, const at::Tensor& grad);

// The place of `param.grad` after its gradient was packed.
enum class GradPlace {
  kOwnMemory,  // `param.grad` stays where it is
  kInSlot,     // `param.grad` lies in the slot afterwards (gradient_as_bucket_view)
  kMovedIn,    // as kInSlot; a gradient that lies in the slot was moved there in this step
  kMovedOut,  // `param.grad` gets memory of its own, with its present value, if it lies in the slot
};

// Fills one slot with `grad` / `divisor`, or with zeros if `grad` is undefined. Without a divisor,
// the slot gets a copy of `grad`, in the slot's dtype. `grad` is the gradient that arrived: a hook
// of the user may have replaced `param.grad` since. kInSlot changes nothing of a `param.grad` that
// was replaced. A gradient that lies in the slot is divided in place, but one that was moved there
// in this step is multiplied by 1 / `divisor`, as in DDP. With kMovedOut, `grad` is `param.grad` or
// undefined.
void pack(
    GradBuffer& buffer,
    const Slot& slot,
    const at::Tensor& param,
    const at::Tensor& grad,
    std::optional<int> divisor,
    GradPlace place);

// Whether `grad` has the place of the slot in memory.
bool lies_in(const Slot& slot, const at::Tensor& grad);

// Does for all slots of a dense buffer with an entry in `grads` (per slot) what pack() does, in a
// few operations. A gradient that lies in its slot stays undivided. The current stream waits for
// the streams that the gradients arrived on.
void pack_all(
    GradBuffer& buffer,
    const std::vector<at::Tensor>& params,
    const std::vector<std::optional<at::Tensor>>& grads,
    std::optional<int> divisor,
    GradPlace place);

// Gives the gradients of `params` the reduced values of these slots.
void write_back(
    const Bucket& bucket,
    const std::vector<const Slot*>& slots,
    const std::vector<at::Tensor>& params,
    GradPlace place);

// Moves a present `param.grad` into a slot of a new bucket, unscaled. Returns true if it moved. A
// gradient that does not fit stays where it is: its next arrival reports the misfit.
bool move_into_slot(const GradBuffer& buffer, const Slot& slot, const at::Tensor& param);

}  // namespace ddpx
