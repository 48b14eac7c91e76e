// The parameters of a reducer, and the hooks on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "../autograd/grad_hook.h"
#include "../autograd/grad_link.h"
#include "../buckets/bucket_plan.h"

namespace ddpx {

struct ReducerParam {
  at::Tensor tensor;
  std::string name;
  bool expect_sparse;
  bool delayed = false;  // its bucket also waits for the gradient of the delay trigger

  // If `tensor` is the local shard of a DTensor: the DTensor, and the link between the gradients.
  at::Tensor leaf = {};
  GradLink link = {};
};

// Params are known by their index. The reducer owns the params, under its mutex.
class Params {
 public:
  // `frozen` are the module's other tensors, which must not require gradients. UserError if there
  // is no param, or if a param is not a leaf that requires a gradient.
  Params(const std::vector<ReducerParam>& params, std::vector<ReducerParam> frozen);

  // Puts a hook on every param. Each gradient calls `listener`.
  void attach_hooks(const std::weak_ptr<GradListener>& listener);

  // Puts hooks back on params that lost theirs in a cast to another dtype and back. Returns the
  // params whose gradients no longer fit: of another dtype, device or number of elements.
  std::vector<std::size_t> restore_hooks(const std::weak_ptr<GradListener>& listener);

  // Calls `listener` before each gradient, too. To be called before each backward that needs it.
  void add_pre_hooks(const std::weak_ptr<GradListener>& listener) const;

  // Takes all hooks off. To be called only while no backward runs.
  void remove_hooks() {
    hooks_.clear();
  }

  // Leaves all hooks where they are, without effect: the engine may be walking the hooks.
  void abandon_hooks();

  std::size_t size() const {
    return tensors_.size();
  }
  const std::vector<at::Tensor>& tensors() const {
    return tensors_;
  }
  const at::Tensor& operator[](std::size_t index) const {
    return tensors_[index];
  }
  const std::string& name(std::size_t index) const {
    return names_[index];
  }
  const std::vector<std::string>& names() const {
    return names_;
  }
  std::vector<std::string> names_of(const std::vector<std::size_t>& indices) const;
  const std::vector<ParamMeta>& metas() const {
    return metas_;
  }

  // Whether no param has a gradient.
  bool no_grads() const;

  // The params as autograd knows them: a DTensor in place of its shard.
  const std::vector<at::Tensor>& leaves() const {
    return leaves_;
  }

  // The device of the first param, which small collectives use.
  c10::Device device() const {
    return tensors_.front().device();
  }

  // The devices of all params, in the order of params.
  std::vector<c10::Device> devices() const;

  const GradLinks& links() const {
    return links_;
  }

  // One hook per param; empty after remove_hooks().
  const std::vector<GradHook>& hooks() const {
    return hooks_;
  }

  bool requires_grad(std::size_t index) const {
    return leaves_[index].requires_grad();
  }
  bool all_frozen() const;

  // The names of the `frozen` tensors that require gradients now.
  std::vector<std::string> unfrozen() const;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> leaves_;
  GradLinks links_;
  std::vector<std::string> names_;
  std::vector<ParamMeta> metas_;
  std::vector<ReducerParam> frozen_;
  std::vector<GradHook> hooks_;  // the hooks hold the listener weakly
};

}  // namespace ddpx
