#include "finite_check.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "../buckets/grad_values.h"

namespace ddpx {
namespace {

// The values to check, in memory. A gradient that is not packed may be of any kind.
at::Tensor values_of(const at::Tensor& grad) {
  switch (grad.layout()) {
    case at::kSparse:
      return grad._values();
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return grad.values();
    case at::kMkldnn:
      return grad.to_dense();
    default:
      return !holds_values(grad) && has_values(grad) ? copy_of_values(grad) : grad;
  }
}

}  // namespace

void FiniteCheck::check(
    const std::vector<std::size_t>& param_indices, const std::vector<at::Tensor>& grads) {
  const at::NoGradGuard no_grad;
  Checked checked;
  std::vector<at::Tensor> all_values;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const auto& grad = grads[i];
    if (!grad.defined() || (!grad.is_floating_point() && !grad.is_complex())) {
      continue;
    }
    auto values = values_of(grad);
    if (values.numel() > 0) {
      checked.param_indices.push_back(param_indices[i]);
      all_values.push_back(std::move(values));
    }
  }
  if (!all_values.empty()) {
    const auto largest = at::_foreach_norm(all_values, std::numeric_limits<double>::infinity());
    checked.finite = at::isfinite(at::stack(largest));
    if (const auto device = checked.finite.device(); !device.is_cpu()) {
      streams_[device.index()].add(device);
    }
    checked_.push_back(std::move(checked));
  }
}

// The `finite` of each check. The host waits once for each device.
std::vector<at::Tensor> FiniteCheck::finite_on_host() {
  std::vector<at::Tensor> all;
  std::map<c10::DeviceIndex, std::vector<std::size_t>>
      on_devices;  // indices of checks that are read together
  for (const auto& checked : checked_) {
    if (const auto device = checked.finite.device(); !device.is_cpu()) {
      streams_[device.index()].wait(device);  // autograd does not, after an abort
      on_devices[device.index()].push_back(all.size());
    }
    all.push_back(checked.finite);
  }
  for (const auto& entry : on_devices) {
    std::vector<at::Tensor> together;
    std::vector<int64_t> sizes;
    for (const auto number : entry.second) {
      together.push_back(all[number]);
      sizes.push_back(all[number].numel());
    }
    const auto read = (together.size() == 1 ? together.front() : at::cat(together)).cpu();
    const auto parts = read.split_with_sizes(sizes);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      all[entry.second[i]] = parts[i];
    }
  }
  return all;
}

std::optional<std::size_t> FiniteCheck::first_not_finite() {
  std::unordered_set<std::size_t> not_finite;
  const auto all_finite = finite_on_host();
  for (std::size_t number = 0; number < checked_.size(); ++number) {
    const auto& checked = checked_[number];
    const auto* flags = all_finite[number].const_data_ptr<bool>();
    for (std::size_t i = 0; i < checked.param_indices.size(); ++i) {
      if (!flags[i]) {
        not_finite.insert(checked.param_indices[i]);
      }
    }
  }
  if (not_finite.empty()) {
    return std::nullopt;
  }
  const auto first = std::find_if(
      order_.begin(), order_.end(), [&](auto index) { return not_finite.count(index) != 0; });
  return first != order_.end() ? *first : *std::min_element(not_finite.begin(), not_finite.end());
}

void FiniteCheck::launch(Collective& collective, c10::Device device) {
  // Pinned, so that the host does not wait for the copy.
  const auto options = at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu());
  const auto found = at::zeros({collective.world_size()}, options);
  if (const auto param_index = first_not_finite()) {
    found.mutable_data_ptr<int64_t>()[collective.rank()] = static_cast<int64_t>(*param_index) + 1;
  }
  found_ = collective.alone() ? found : found.to(device, /*non_blocking=*/true);
  work_ = collective.alone() ? nullptr : collective.all_reduce_sum(found_);
}

std::vector<FiniteCheck::Finding> FiniteCheck::agree(Collective& collective, c10::Device device) {
  if (!found_.defined()) {
    launch(collective, device);
  }
  if (work_) {
    collective.wait(*std::exchange(work_, nullptr), device);
  }
  const auto found = found_.cpu();
  const auto* places = found.const_data_ptr<int64_t>();
  std::vector<Finding> findings;
  for (int rank = 0; rank < collective.world_size(); ++rank) {
    if (places[rank] != 0) {
      findings.push_back({rank, static_cast<std::size_t>(places[rank] - 1)});
    }
  }
  return findings;
}

}  // namespace ddpx
