// Params whose gradient autograd keeps in another tensor than the one that lies in buckets.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace ddpx {

// A DTensor parameter, as autograd knows it, and the local shard, whose gradient is reduced. Both
// have a `grad`; the DTensor's is what the user sees. Made by Python. Called with the reducer's
// mutex held.
class GradLink {
 public:
  virtual ~GradLink() = default;

  // Makes the shard's gradient the local part of the DTensor's.
  virtual void pull() = 0;

  // Makes the DTensor's gradient one whose local part is the shard's, which the shard lets go.
  virtual void push() = 0;
};

// The links of a reducer's params; none for a param that is a plain tensor.
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
