#include "arrival_order.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../errors.h"

namespace ddpx {
namespace {

// Another call of rank 0, such as the broadcast of a buffer, may have sent other numbers.
void check_received(const std::vector<int64_t>& order) {
  std::vector<bool> seen(order.size(), false);
  for (const auto param_index : order) {
    const auto place = static_cast<std::size_t>(param_index);
    if (param_index < 0 || place >= order.size() || seen[place]) {
      throw UserError(
          "rank 0 sent something else, because ranks have made different collective calls. All "
          "ranks must run equally many forwards and backwards of this wrapper, and make the "
          "collective calls of the script in the same order.");
    }
    seen[place] = true;
  }
}

}  // namespace

ArrivalOrder::ArrivalOrder(std::size_t num_params, bool wanted)
    : num_params_(num_params), stage_(wanted ? Stage::kWanted : Stage::kDone) {}

void ArrivalOrder::complete(const std::vector<std::size_t>& arrivals) {
  if (!wanted()) {
    return;
  }
  std::vector<bool> arrived(num_params_, false);
  std::vector<std::size_t> reversed;
  for (auto param_index = arrivals.rbegin(); param_index != arrivals.rend(); ++param_index) {
    if (!arrived[*param_index]) {
      arrived[*param_index] = true;
      reversed.push_back(*param_index);
    }
  }
  order_.assign(reversed.rbegin(), reversed.rend());
  for (std::size_t i = 0; i < num_params_; ++i) {
    if (!arrived[i]) {
      order_.push_back(i);
    }
  }
  stage_ = Stage::kDue;
}

std::vector<std::size_t> ArrivalOrder::agree(Collective& collective, c10::Device device) const {
  if (collective.alone()) {
    return order_;
  }
  auto order = at::empty({static_cast<int64_t>(num_params_)}, at::kLong);
  std::copy(order_.begin(), order_.end(), order.mutable_data_ptr<int64_t>());
  order = order.to(device);
  collective.broadcast_from_rank_0(order);
  order = order.cpu();
  const auto* agreed = order.const_data_ptr<int64_t>();
  check_received({agreed, agreed + order.numel()});
  return {agreed, agreed + order.numel()};
}

void ArrivalOrder::retire(std::vector<std::size_t> agreed) {
  stage_ = Stage::kDone;
  order_.clear();
  agreed_ = std::move(agreed);
}

}  // namespace ddpx
