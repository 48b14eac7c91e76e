#include "used_map.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "errors.h"

namespace ddpx {
namespace {

// A fresh copy each time: the backend, or a copy to the device, may still read the last one.
at::Tensor to_device(const std::vector<int32_t>& values, c10::Device device) {
  const bool pinned = !device.is_cpu();
  const auto numel = static_cast<int64_t>(values.size());
  auto host = at::empty({numel}, at::TensorOptions(at::kInt).pinned_memory(pinned));
  std::memcpy(host.mutable_data_ptr<int32_t>(), values.data(), values.size() * sizeof(int32_t));
  return device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
}

}  // namespace

UsedMap::UsedMap(std::size_t num_params, c10::Device device)
    : device_(device), local_(num_params, 0) {}

void UsedMap::mark(std::size_t param_index) {
  local_[param_index] = 1;
}

void UsedMap::launch(Collective& collective) {
  settle();
  global_.clear();
  if (collective.alone()) {
    global_ = settled_.alone = local_;
    return;
  }
  summed_ = to_device(local_, device_);
  work_ = collective.all_reduce_sum(summed_);
  launched_in_ = &collective;
}

const std::vector<int32_t>& UsedMap::num_ranks_using() {
  if (global_.empty()) {
    if (!work_) {
      throw InternalError("the used-map was read before ranks agreed on it");
    }
    settle();
    global_ = settled_.read();
  }
  return global_;
}

std::vector<int32_t> UsedMap::Sums::read() const {
  if (!of_ranks.defined()) {
    return alone;
  }
  const auto host = of_ranks.cpu();
  const auto* sums = host.const_data_ptr<int32_t>();
  return {sums, sums + host.numel()};
}

bool UsedMap::all_marked() const {
  return std::find(local_.begin(), local_.end(), 0) == local_.end();
}

void UsedMap::settle() {
  if (const auto work = std::exchange(work_, Collective::Work())) {
    launched_in_->wait(*work, device_);
    settled_.of_ranks = summed_;
  }
}

void UsedMap::clear() {
  std::fill(local_.begin(), local_.end(), 0);
  global_.clear();
  if (work_) {
    settled_.of_ranks.reset();  // its memory: a newer agreement is under way
  }
}

}  // namespace ddpx
