// The order in which gradients arrive in the first step that counts. Buckets are rebuilt by it.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "../comm/collective.h"

namespace ddpx {

// The reducer owns the order, under its mutex.
class ArrivalOrder {
 public:
  // If not `wanted`, the order is never recorded and buckets are never rebuilt.
  ArrivalOrder(std::size_t num_params, bool wanted);

  // Whether the order of the running step counts.
  bool wanted() const {
    return stage_ == Stage::kWanted;
  }

  // The step that counts has ended. `arrivals` are the params of the arrived gradients and parts of
  // gradients, in order. Where a gradient came in several parts, the last part counts. Params
  // without a gradient come last, in registration order, as in DDP. So every rank has a complete
  // order, and all ranks rebuild at the same forward. Does nothing unless wanted().
  void complete(const std::vector<std::size_t>& arrivals);

  // Whether buckets are to be rebuilt by this order, once.
  bool due() const {
    return stage_ == Stage::kDue;
  }

  // Rank 0's order, on every rank: a collective call.
  std::vector<std::size_t> agree(Collective& collective, c10::Device device) const;

  // The buckets have been rebuilt by the order that agree() returned.
  void retire(std::vector<std::size_t> agreed);

  // The order of retire(); empty before.
  const std::vector<std::size_t>& agreed() const {
    return agreed_;
  }

 private:
  enum class Stage { kWanted, kDue, kDone };

  std::size_t num_params_;
  Stage stage_;
  std::vector<std::size_t> order_;  // complete once due
  std::vector<std::size_t> agreed_;
};

}  // namespace ddpx
