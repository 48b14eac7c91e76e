// The order in which gradients arrive in the first step that counts, by which buckets are rebuilt.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "../comm/collective.h"

namespace ddpx {

// Not thread-safe: the reducer's mutex guards it.
class ArrivalOrder {
 public:
  // If not `wanted`, no order is ever recorded and no rebuild comes.
  ArrivalOrder(std::size_t num_params, bool wanted);

  // Forgets an order that was not completed, as that of a step that broke off.
  void restart();

  // A gradient, or a part of one, arrived. Nothing once the order is complete.
  void record(std::size_t param_index);

  // Ends the step that counts. Params without a gradient come last, in registration order, as DDP
  // has them; so every rank has a complete order, and all rebuild at the same forward.
  void complete();

  // Whether buckets are to be rebuilt by this order, once.
  bool due() const {
    return stage_ == Stage::kDue;
  }

  // Rank 0's order, on every rank: a collective call.
  std::vector<std::size_t> agree(Collective& collective, c10::Device device) const;

  // The buckets have been rebuilt.
  void retire();

 private:
  enum class Stage { kRecording, kDue, kDone };

  std::size_t num_params_;
  Stage stage_;
  std::vector<std::size_t> order_;
};

}  // namespace ddpx
