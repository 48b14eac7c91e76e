// Links between the gradients of DTensors and the gradients of their local shards.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace ddpx {

// Connects a DTensor parameter, which autograd and the user see, with its local shard, whose
// gradient is reduced. Both have a `grad`. Python makes the functions. They are called with the
// mutex of the reducer held.
struct GradLink {
  // The gradient of the shard becomes the local part of the gradient of the DTensor.
  std::function<void()> pull;

  // The gradient of the DTensor becomes one whose local part is the gradient of the shard. The
  // shard has no gradient afterwards.
  std::function<void()> push;
};

// The links of all params of a reducer. A plain tensor has a link without functions.
class GradLinks {
 public:
  void add(std::size_t param_index, GradLink link) {
    links_.resize(param_index + 1);
    links_.back() = std::move(link);
  }
  void pull(std::size_t param_index) const {
    if (param_index < links_.size() && links_[param_index].pull) {
      links_[param_index].pull();
    }
  }
  void push(std::size_t param_index) const {
    if (param_index < links_.size() && links_[param_index].push) {
      links_[param_index].push();
    }
  }
  void pull_all() const {
    for (std::size_t i = 0; i < links_.size(); ++i) {
      pull(i);
    }
  }
  void push_all() const {
    for (std::size_t i = 0; i < links_.size(); ++i) {
      push(i);
    }
  }

 private:
  std::vector<GradLink> links_;
};

}  // namespace ddpx
