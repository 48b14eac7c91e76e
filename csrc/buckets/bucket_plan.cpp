#include "bucket_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "../errors.h"

namespace ddpx {
namespace {

constexpr auto kNoCap = std::numeric_limits<int64_t>::max();

// The open bucket of one dtype and device, for delayed params or for the others.
struct OpenBucket {
  c10::ScalarType dtype;
  c10::Device device;
  bool delayed;
  std::size_t cap_index = 0;  // each dtype and device has its own index into the caps
  int64_t bytes = 0;
  std::vector<std::size_t> param_indices;
};

OpenBucket& open_bucket_for(std::vector<OpenBucket>& open, const ParamMeta& param) {
  for (auto& bucket : open) {
    if (bucket.dtype == param.dtype && bucket.device == param.device &&
        bucket.delayed == param.delayed) {
      return bucket;
    }
  }
  open.push_back(OpenBucket{param.dtype, param.device, param.delayed, 0, 0, {}});
  return open.back();
}

// Puts params in the given order into one open bucket per dtype and device. A bucket is closed when
// it reaches its cap. The plan has the buckets in the order in which they close.
std::vector<BucketSpec> assign(
    const std::vector<ParamMeta>& params,
    const std::vector<std::size_t>& order,
    const std::vector<int64_t>& caps) {
  std::vector<BucketSpec> closed;
  std::vector<OpenBucket> open;
  for (const auto param_index : order) {
    const auto& param = params[param_index];
    if (param.expect_sparse) {
      closed.push_back(BucketSpec{{param_index}});
      continue;
    }
    auto& bucket = open_bucket_for(open, param);
    bucket.param_indices.push_back(param_index);
    bucket.bytes += param.numel * param.element_bytes;
    if (!bucket.delayed && bucket.bytes >= caps[bucket.cap_index]) {
      closed.push_back(BucketSpec{std::exchange(bucket.param_indices, {})});
      bucket.bytes = 0;
      bucket.cap_index = std::min(bucket.cap_index + 1, caps.size() - 1);
    }
  }
  for (auto& bucket : open) {
    if (!bucket.param_indices.empty()) {
      closed.push_back(BucketSpec{std::move(bucket.param_indices)});
    }
  }
  return closed;
}

}  // namespace

ParamMeta ParamMeta::of(const at::Tensor& param, bool expect_sparse) {
  return ParamMeta{
      param.numel(),
      static_cast<int64_t>(param.element_size()),
      param.scalar_type(),
      param.device(),
      expect_sparse};
}

BucketPlan BucketPlan::initial(
    const std::vector<ParamMeta>& params, const BucketCaps& caps, GraphMode mode) {
  std::vector<int64_t> limits = caps.listed_bytes;
  if (limits.empty() && mode == GraphMode::kFindUnused) {
    limits = {caps.first_bytes, caps.cap_bytes};
  } else if (limits.empty()) {
    // One bucket until the arrival order is known: with a split by a wrong guess, buckets and the
    // module's own collectives could interleave differently on each rank.
    limits = {kNoCap};
  }
  std::vector<std::size_t> registration_order(params.size());
  std::iota(registration_order.begin(), registration_order.end(), 0);
  auto buckets = assign(params, registration_order, limits);
  const auto first_param = [](const BucketSpec& bucket) {
    return *std::min_element(bucket.param_indices.begin(), bucket.param_indices.end());
  };
  std::sort(buckets.begin(), buckets.end(), [&](const BucketSpec& a, const BucketSpec& b) {
    return first_param(a) > first_param(b);
  });
  return BucketPlan(params, std::move(buckets));
}

BucketPlan BucketPlan::by_arrival(
    const std::vector<ParamMeta>& params,
    const BucketCaps& caps,
    const std::vector<std::size_t>& arrival_order) {
  for (const auto param_index : arrival_order) {
    if (param_index >= params.size()) {
      throw InternalError("arrival order names param " + std::to_string(param_index));
    }
  }
  const auto limits = caps.listed_bytes.empty()
                          ? std::vector<int64_t>{caps.first_bytes, caps.cap_bytes}
                          : caps.listed_bytes;
  return BucketPlan(params, assign(params, arrival_order, limits));
}

BucketPlan BucketPlan::listed(
    const std::vector<ParamMeta>& params, std::vector<std::vector<std::size_t>> buckets) {
  std::vector<BucketSpec> specs;
  for (auto& indices : buckets) {
    for (const auto param_index : indices) {
      if (param_index >= params.size()) {
        throw InternalError("a listed bucket names param " + std::to_string(param_index));
      }
    }
    specs.push_back(BucketSpec{std::move(indices)});
  }
  return BucketPlan(params, std::move(specs));
}

BucketPlan BucketPlan::delayed_behind(
    const std::vector<ParamMeta>& params, std::size_t trigger) const {
  const auto trigger_bucket = location(trigger).bucket_index;
  std::vector<BucketSpec> before;
  std::vector<BucketSpec> delayed;
  std::vector<BucketSpec> after;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const bool is_delayed = params[buckets_[b].param_indices.front()].delayed;
    auto& part = is_delayed ? delayed : b <= trigger_bucket ? before : after;
    part.push_back(buckets_[b]);
  }
  before.insert(before.end(), delayed.begin(), delayed.end());
  before.insert(before.end(), after.begin(), after.end());
  return BucketPlan(params, std::move(before));
}

BucketPlan::BucketPlan(const std::vector<ParamMeta>& params, std::vector<BucketSpec> buckets)
    : buckets_(std::move(buckets)) {
  constexpr auto kNowhere = std::numeric_limits<std::size_t>::max();
  locations_.assign(params.size(), SlotLocation{kNowhere, kNowhere});
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& indices = buckets_[b].param_indices;
    if (indices.empty()) {
      throw InternalError("bucket " + std::to_string(b) + " is empty");
    }
    const auto& first = params[indices.front()];
    for (std::size_t s = 0; s < indices.size(); ++s) {
      const auto& param = params[indices[s]];
      if (param.dtype != first.dtype || param.device != first.device) {
        throw InternalError("bucket " + std::to_string(b) + " mixes dtypes or devices");
      }
      if (param.delayed != first.delayed) {
        throw InternalError("bucket " + std::to_string(b) + " mixes delayed params with others");
      }
      if (param.expect_sparse && indices.size() != 1) {
        throw InternalError("sparse param " + std::to_string(indices[s]) + " shares a bucket");
      }
      if (locations_[indices[s]].bucket_index != kNowhere) {
        throw InternalError("param " + std::to_string(indices[s]) + " lies in two buckets");
      }
      locations_[indices[s]] = SlotLocation{b, s};
    }
  }
  for (std::size_t i = 0; i < locations_.size(); ++i) {
    if (locations_[i].bucket_index == kNowhere) {
      throw InternalError("param " + std::to_string(i) + " lies in no bucket");
    }
  }
}

}  // namespace ddpx
