#include "taken_grads.h"

namespace ddpx {

void TakenGrads::start(const std::vector<at::Tensor>& params, bool averaged) {
  versions_.resize(params.size());
  for (std::size_t i = 0; averaged && i < params.size(); ++i) {
    versions_[i].averaged = params[i]._version();
  }
}

void TakenGrads::take(std::size_t param_index, const at::Tensor& param, bool has_average) {
  auto& versions = versions_[param_index];
  const auto version = param._version();
  const bool applies_average = has_average && versions.averaged == version;
  if (!applies_average && !versions.taken) {
    versions.taken = version;
  }
}

void TakenGrads::record_average(std::size_t param_index, const at::Tensor& param) {
  versions_[param_index] = {param._version(), std::nullopt};
}

std::vector<std::size_t> TakenGrads::pop_changed(const std::vector<at::Tensor>& params) {
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < versions_.size(); ++i) {
    auto& taken = versions_[i].taken;
    if (taken && *taken != params[i]._version()) {
      changed.push_back(i);
      taken.reset();
    }
  }
  return changed;
}

}  // namespace ddpx
