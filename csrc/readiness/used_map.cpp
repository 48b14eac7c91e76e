#include "used_map.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "../buckets/device_stream.h"
#include "../errors.h"

namespace ddpx {
namespace {

// A fresh tensor each time: the backend, or a copy to the device, may still read the previous one.
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
  local_[param_index] |= 1;
}

void UsedMap::unmark(std::size_t param_index) {
  local_[param_index] &= ~kUsers;
}

void UsedMap::mark_nested(std::size_t param_index) {
  local_[param_index] |= 1 << kNestedShift;
}

void UsedMap::launch(Collective& collective) {
  wait();
  global_.clear();
  nesting_.clear();
  exchanged_ = true;
  if (collective.world_size() > kMostRanks) {
    throw UserError(
        "find_unused_parameters=True and static_graph=True support at most " +
        std::to_string(kMostRanks) + " ranks. Leave both options out.");
  }
  if (collective.alone()) {
    last_sums_.alone = local_;
    global_ = users_of(local_);
    return;
  }
  summed_ = to_device(local_, device_);
  // A profile may stop before an unread sum ends. torch's profiler would then write the end of the
  // sum into freed memory.
  const at::DisableRecordFunctionGuard unrecorded;
  work_ = collective.all_reduce_sum(summed_);
  collective_ = &collective;
}

const std::vector<int32_t>& UsedMap::num_ranks_using() {
  if (global_.empty()) {
    if (!exchanged_) {
      throw InternalError("the used-map was read before ranks exchanged it");
    }
    wait();
    const auto values = last_sums_.read();
    global_ = users_of(values);
    for (const auto value : values) {
      nesting_.push_back(static_cast<int32_t>(static_cast<uint32_t>(value) >> kNestedShift));
    }
  }
  return global_;
}

std::vector<int32_t> UsedMap::users_of(std::vector<int32_t> values) {
  std::transform(values.begin(), values.end(), values.begin(), num_users);
  return values;
}

std::vector<int32_t> UsedMap::Sums::num_ranks_using() const {
  return users_of(read());
}

std::vector<int32_t> UsedMap::Sums::read() const {
  if (!of_ranks.defined()) {
    return alone;
  }
  if (stream) {
    wait_for_stream(*current_stream(of_ranks.device()), *stream);
  }
  const auto host = of_ranks.cpu();
  const auto* sums = host.const_data_ptr<int32_t>();
  return {sums, sums + host.numel()};
}

void UsedMap::wait() {
  if (const auto work = std::exchange(work_, Collective::Work())) {
    collective_->wait(*work, device_);
    keep_for_current_stream(summed_);  // the stream of the launch has not waited for the exchange
    last_sums_.of_ranks = summed_;
    last_sums_.stream = current_stream(device_);
  }
}

void UsedMap::clear() {
  std::fill(local_.begin(), local_.end(), 0);
  global_.clear();
  nesting_.clear();
  exchanged_ = false;
  if (work_) {
    last_sums_.of_ranks.reset();  // the memory of these sums belongs to a newer exchange
  }
}

}  // namespace ddpx
