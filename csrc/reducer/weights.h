// The weights of the items of this rank, for averages by weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "../autograd/output_watch.h"
#include "../buckets/stream_set.h"
#include "weight_sum.h"

namespace ddpx {

// The average that a step makes of the gradients of all ranks.
enum class Average {
  kMean,     // their sum, divided by the number of ranks
  kSum,      // their sum
  kWeights,  // their sum, divided by the sum of the weights of all ranks
};

// Each forward has a weight: the number of items that its loss sums over. A step divides by the
// weights of all forwards since the last step, because gradients of local backwards add up, too.
//
// A weight is a number, or a tensor on the device of the params, which the host does not read. A
// tensor with a negative, infinite or undefined number counts as NaN.
//
// The reducer owns this object, under its mutex.
class Weights {
 public:
  // Sets the weight of the next forward, in place of a weight that no forward has taken. A number
  // is 0 or more, and finite. A tensor has one element on `device`.
  void set(double number);
  void set(const at::Tensor& tensor, c10::Device device);

  // Whether the next forward has a weight.
  bool is_set() const {
    return next_.has_value();
  }

  // A forward has ended, and takes the weight that was set.
  void count(WatchedForward forward = {});

  // The backward of a forward that bypassed the wrapper begins, and takes the weight that was set.
  // After a penalty, the weight is that of the next forward.
  void count_bypass();

  // The script has cleared all gradients before it called set(). See belongs_to_grads().
  void mark_grads_cleared() {
    is_sum_cleared_ = belongs_to_grads();
  }

  // Whether a forward has taken a weight since the last take().
  bool counted() const {
    return sum_.has_value();
  }

  // Whether set() or count() got a number since the last take(). A captured step must not have one.
  bool has_number() const;

  // Returns the sum as a new float64 tensor with one element on `device`, and forgets the sum.
  at::Tensor take(c10::Device device);

  // Whether take() took the weight of a forward that no backward has reached. Forgets the forwards.
  bool took_too_much();

  // A backward of the last forward has raised. Gradients of earlier forwards may remain, without
  // their weights.
  void break_off() {
    if (has_lost_ || forwards_.size() + taken_.size() > 1) {
      lose();
    } else {
      forget();
    }
  }
  bool has_lost() const {
    return has_lost_;
  }

  // Whether a backward has reached a forward whose weight is in the sum, or was taken by the step
  // that is pending.
  bool has_grads() const {
    const auto reached = [](const auto& forward) { return !forward.left_out(); };
    return std::any_of(forwards_.begin(), forwards_.end(), reached) ||
           std::any_of(taken_.begin(), taken_.end(), reached);
  }

  // As forget(), but gradients of these forwards may remain.
  void lose() {
    forget();
    has_lost_ = true;
  }

  // The script has cleared the gradients of the forwards that lose() forgot.
  void end_loss() {
    has_lost_ = false;
  }

  // Whether the sum is of no use if all gradients are undefined: backwards have made gradients of
  // all its forwards, and the script has cleared them.
  bool belongs_to_grads() const;

  // Keeps the sum of a step, which the next step reads. Returns the sum of the last step.
  std::optional<UnreadWeights> replace_unread(std::optional<UnreadWeights> unread) {
    return std::exchange(unread_, std::move(unread));
  }

  // Forgets the sum: the gradients of these forwards are lost.
  void forget() {
    has_lost_ = false;
    is_sum_cleared_ = false;
    sum_.reset();
    forwards_.clear();
    last_forward_ = {};
    taken_.clear();
    if (!next_) {
      streams_.forget();  // a captured step could not wait for them
    }
  }

 private:
  struct Weight {
    std::optional<double> number;
    at::Tensor tensor;
  };

  std::optional<Weight> next_;
  std::optional<Weight> sum_;
  std::vector<WatchedForward> forwards_;  // of `sum_`, without weights of 0
  WatchedForward last_forward_;           // of `sum_`, with any weight
  std::vector<WatchedForward> taken_;     // of the last take()
  std::optional<UnreadWeights> unread_;
  bool has_lost_ = false;        // see lose()
  bool is_sum_cleared_ = false;  // see mark_grads_cleared()
  StreamSet streams_;            // that computed the tensors
};

}  // namespace ddpx
