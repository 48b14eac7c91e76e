// The gradients that have come since the last forward.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "arrival_tracker.h"

namespace ddpx {

// A forward may have several outputs, and each of them a backward of its own. So a param that one
// backward left without a gradient may get its gradient in a later one.
// The reducer owns this object, under its mutex.
class ForwardGrads {
 public:
  explicit ForwardGrads(std::size_t num_params) : arrived_(num_params, false) {}

  // A new forward begins, or the last forward is over. Forgets all.
  void restart() {
    arrived_.assign(arrived_.size(), false);
    end_forward();
  }

  // The outputs of a synchronized forward exist.
  void await_backward() {
    awaits_backward_ = true;
  }

  // Whether no step has ended since await_backward().
  bool awaits_backward() const {
    return awaits_backward_;
  }

  // A step has broken off, or the backward of the last forward will not come.
  void end_forward() {
    awaits_backward_ = false;
    possibly_late_.clear();
  }

  // A step has ended.
  void record(const ArrivalTracker& step) {
    awaits_backward_ = false;
    for (std::size_t i = 0; i < arrived_.size(); ++i) {
      arrived_[i] = arrived_[i] || step.arrived(i);
    }
  }

  // Whether a step since the last forward brought the gradient.
  bool arrived(std::size_t param_index) const {
    return arrived_[param_index];
  }

  // Params without a gradient in the last step, which another output of the forward may bring.
  void expect(std::vector<std::size_t> possibly_late) {
    possibly_late_ = std::move(possibly_late);
  }

  // The params of expect() whose gradients have not come since.
  std::vector<std::size_t> never_came() const {
    auto indices = possibly_late_;
    std::erase_if(indices, [this](std::size_t param_index) { return arrived_[param_index]; });
    return indices;
  }

 private:
  std::vector<bool> arrived_;  // per param
  std::vector<std::size_t> possibly_late_;
  bool awaits_backward_ = false;
};

}  // namespace ddpx
