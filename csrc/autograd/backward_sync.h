// Whether the backward that runs averages gradients, or leaves them local.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace ddpx {

// Whether the forward of a watched output ran with synchronization.
enum class ForwardSync {
  kOn,
  kOff,       // inside no_sync()
  kReplaced,  // outside no_sync(), with other tensors in the places of all params
};

// The rule for a backward that runs while synchronization is on. Such a backward averages, unless
// every watched output that it reaches comes from a forward inside no_sync() and the first of them
// is reached before the first gradient. prepare() overrides this.
// docs/gradient_accumulation.md has the table.
// Owned by the reducer, whose mutex guards it. Any thread of a backward may call.
class BackwardSync {
 public:
  // The next backward averages, wherever its forward ran.
  void prepare() {
    prepared_ = true;
  }
  bool prepared() const {
    return prepared_;
  }

  // The backward that runs has reached a watched output.
  void reach_output(ForwardSync forward) {
    if (forward != ForwardSync::kOff || prepared_) {
      averages_ = true;
      expects_grads_ = expects_grads_ || forward != ForwardSync::kReplaced;
    } else {
      reached_local_ = true;
    }
  }

  // Whether the backward has reached an output whose gradients are to be averaged.
  bool output_reached() const {
    return averages_;
  }

  // Whether this backward makes a step even if it brings no gradient. Not after kReplaced: the
  // other tensors may be independent of the params, and peers expect no step then.
  bool expects_grads() const {
    return expects_grads_;
  }

  // Whether a gradient that arrives now stays local.
  bool local() const {
    return reached_local_ && !averages_ && !prepared_;
  }

  // A gradient has arrived while local() held.
  void keep_local(std::size_t param_index) {
    local_arrivals_.push_back(param_index);
  }

  // The params of keep_local(), in their order, once local() does not hold any more.
  std::vector<std::size_t> take_local_arrivals() {
    return std::exchange(local_arrivals_, {});
  }

  // The backward has ended or aborted. `was_prepared` is false if prepare() was not called for this
  // backward: synchronization was off, or autograd.grad() ran the backward.
  void end(bool was_prepared) {
    const bool prepared = prepared_ && !was_prepared;
    *this = BackwardSync();
    prepared_ = prepared;
  }

 private:
  bool prepared_ = false;
  bool reached_local_ = false;
  bool averages_ = false;
  bool expects_grads_ = false;
  std::vector<std::size_t> local_arrivals_;
};

}  // namespace ddpx
