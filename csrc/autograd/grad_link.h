// Links between the gradients of DTensors and the gradients of their local shards.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace ddpx {

// Connects a DTensor parameter, which autograd and the user see, with its local shard, whose
// gradient is reduced. Both have a `grad`. Python makes the link. Called with the mutex of the
// reducer held.
class GradLink {
 public:
  virtual ~GradLink() = default;

  // The gradient of the shard becomes the local part of the gradient of the DTensor.
  virtual void pull() = 0;

  // The gradient of the DTensor becomes one whose local part is the gradient of the shard. The
  // shard has no gradient afterwards.
  virtual void push() = 0;
};

// The links of all params of a reducer. A plain tensor has no link.
class GradLinks {
 public:
  void add(std::size_t param_index, std::shared_ptr<GradLink> link) {
    links_.resize(param_index + 1);
    links_.back() = std::move(link);
  }
  void pull(std::size_t param_index) const {
    if (param_index < links_.size() && links_[param_index]) {
      links_[param_index]->pull();
    }
  }
  void push(std::size_t param_index) const {
    if (param_index < links_.size() && links_[param_index]) {
      links_[param_index]->push();
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
  std::vector<std::shared_ptr<GradLink>> links_;
};

}  // namespace ddpx
