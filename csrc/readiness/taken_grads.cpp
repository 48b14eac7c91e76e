#include "taken_grads.h"

#include <algorithm>

#include "../buckets/grad_values.h"

namespace ddpx {
namespace {

constexpr int64_t kNumSamples = 16;

// A hash (FNV-1a) of a few elements, spread over the param. 0 if the host cannot read the param.
uint64_t sample(const at::Tensor& param) {
  if (!holds_values_on_cpu(param) || !param.is_non_overlapping_and_dense()) {
    return 0;
  }
  const auto* bytes = static_cast<const unsigned char*>(param.const_data_ptr());
  const auto size = static_cast<int64_t>(param.element_size());
  const auto num_samples = std::min(kNumSamples, param.numel());
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i = 0; i < num_samples; ++i) {
    const auto element = i * (param.numel() - 1) / std::max<int64_t>(num_samples - 1, 1);
    for (int64_t byte = 0; byte < size; ++byte) {
      hash = (hash ^ bytes[element * size + byte]) * 0x100000001b3;
    }
  }
  return hash;
}

}  // namespace

TakenGrads::Content::Content(const at::Tensor& param)
    : version(param._version()), sample(ddpx::sample(param)) {}

void TakenGrads::start(const std::vector<at::Tensor>& params, bool averaged) {
  contents_.resize(params.size());
  for (std::size_t i = 0; averaged && i < params.size(); ++i) {
    contents_[i].averaged = Content(params[i]);
  }
}

void TakenGrads::take(std::size_t param_index, const at::Tensor& param, bool has_average) {
  auto& contents = contents_[param_index];
  const Content content(param);
  const bool applies_average = has_average && contents.averaged == content;
  if (!applies_average && !contents.taken) {
    contents.taken = content;
  }
}

void TakenGrads::record_average(std::size_t param_index, const at::Tensor& param) {
  contents_[param_index] = {Content(param), std::nullopt};
}

std::vector<std::size_t> TakenGrads::pop_changed(const std::vector<at::Tensor>& params) {
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < contents_.size(); ++i) {
    auto& taken = contents_[i].taken;
    if (taken && *taken != Content(params[i])) {
      changed.push_back(i);
      taken.reset();
    }
  }
  return changed;
}

}  // namespace ddpx
