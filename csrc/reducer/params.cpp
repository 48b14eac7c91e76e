#include "params.h"

#include <algorithm>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/param_grad.h"
#include "step_errors.h"

namespace ddpx {
namespace {

const at::Tensor& leaf_of(const ReducerParam& param) {
  return param.leaf.defined() ? param.leaf : param.tensor;
}

// The number of elements of a DTensor is not that of its shard.
bool fits(const at::Tensor& leaf, const at::Tensor& param, const ParamMeta& meta) {
  return (!leaf.is_same(param) || leaf.numel() == meta.numel) && leaf.scalar_type() == meta.dtype &&
         leaf.device() == meta.device;
}

}  // namespace

Params::Params(const std::vector<ReducerParam>& params, std::vector<ReducerParam> frozen)
    : frozen_(std::move(frozen)) {
  if (params.empty()) {
    throw UserError(
        "the reducer got no parameters. Pass at least one parameter that requires a gradient.");
  }
  for (const auto& param : params) {
    const auto& leaf = leaf_of(param);
    if (!leaf.requires_grad() || !leaf.is_leaf()) {
      throw UserError(
          "parameter '" + param.name +
          "' cannot be averaged, because it is not an autograd leaf that requires a gradient. Pass "
          "a leaf that requires a gradient, such as a torch.nn.Parameter.");
    }
    tensors_.push_back(param.tensor);
    leaves_.push_back(leaf);
    names_.push_back(param.name);
    metas_.push_back(ParamMeta::of(param.tensor, param.expect_sparse));
    metas_.back().delayed = param.delayed;
    if (param.link.pull) {
      links_.add(tensors_.size() - 1, param.link);
    }
  }
}

void Params::attach_hooks(const std::weak_ptr<GradListener>& listener) {
  hooks_.reserve(size());
  for (std::size_t i = 0; i < size(); ++i) {
    hooks_.emplace_back(leaves_[i], i, listener);
  }
}

std::vector<std::size_t> Params::restore_hooks(const std::weak_ptr<GradListener>& listener) {
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    if (hooks_[i].attached_to(leaves_[i])) {
      continue;
    }
    if (!fits(leaves_[i], tensors_[i], metas_[i])) {
      changed.push_back(i);
    } else if (leaves_[i].requires_grad()) {
      GradHook hook(leaves_[i], i, listener);
      if (running_task::in_backward()) {
        hooks_[i].abandon();
      }
      hooks_[i] = std::move(hook);
    }
  }
  return changed;
}

void Params::add_pre_hooks(const std::weak_ptr<GradListener>& listener) const {
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    GradHook::add_pre_hook(leaves_[i], i, listener);
  }
}

void Params::abandon_hooks() {
  for (auto& hook : hooks_) {
    hook.abandon();
  }
}

std::vector<std::string> Params::names_of(const std::vector<std::size_t>& indices) const {
  std::vector<std::string> names;
  names.reserve(indices.size());
  for (const auto index : indices) {
    names.push_back(names_[index]);
  }
  return names;
}

std::vector<c10::Device> Params::devices() const {
  std::vector<c10::Device> found;
  for (const auto& tensor : tensors_) {
    if (std::find(found.begin(), found.end(), tensor.device()) == found.end()) {
      found.push_back(tensor.device());
    }
  }
  return found;
}

bool Params::all_frozen() const {
  return std::none_of(
      leaves_.begin(), leaves_.end(), [](const auto& leaf) { return leaf.requires_grad(); });
}

std::vector<std::string> Params::unfrozen() const {
  std::vector<std::string> names;
  for (const auto& param : frozen_) {
    if (param.tensor.requires_grad()) {
      names.push_back(param.name);
    }
  }
  return names;
}

bool Params::no_grads() const {
  return std::none_of(
      leaves_.begin(), leaves_.end(), [](const auto& leaf) { return grad_of(leaf).defined(); });
}

}  // namespace ddpx
