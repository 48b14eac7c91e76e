// One step of gradient reduction: pack, launch, wait, write back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../buckets/packing.h"
#include "../comm/launch_queue.h"
#include "../readiness/arrival_tracker.h"
#include "../readiness/grad_versions.h"
#include "step_collectives.h"

namespace ddpx {

// A step moves the gradients of one synchronized backward from `param.grad` into buckets and back,
// from the first gradient to the last write-back. StepCollectives makes the collective calls.
// StepRunner creates the step when it begins, and destroys the step when it ends or breaks off.
//
// Every method needs the mutex of the context. A method releases the mutex while it waits for
// communication or runs a communication hook. Threads of a backward call begin() and arrive(), and
// the thread that ends the backward calls launch_rest(), finish() or match_peers(). With manual
// finalization, any thread may call finish(). Any thread may call the const methods.
class Step {
 public:
  // `context` must outlive the step.
  explicit Step(ReducerContext& context);

  // Packs what is final from the start: gradients of frozen, and of unused params.
  void begin();

  // A gradient, or a part of a gradient, has arrived in `param.grad`.
  void arrive(std::size_t param_index);

  // Backward has ended. Completes missing gradients from the present `param.grad`, so that peers
  // get correct means, and launches all buckets that are left. Without effect in a second call.
  // Throws the error of a launch that fails, or that has failed before.
  void launch_rest();

  // Manual finalization: from now to finish(), a change of a gradient or of a param is an error of
  // the step. To be called after launch_rest().
  void hold_grads();

  // Calls launch_rest(), then waits for all buckets and writes the gradients back. Afterwards
  // error() returns the first error of the step. Throws the error of a launch or a wait that fails.
  void finish();

  // Whether finish() may run before backward has ended: all gradients are final, and all buckets
  // are launched.
  bool ready() const;

  // Backward broke off. If peers cannot know of that, because every bucket was launched, makes the
  // collective calls that peers make at the end of the step. Returns false if peers wait for this
  // rank. The first step has launched no bucket yet. On CPU, this method then launches all buckets
  // if every gradient has arrived. On a device, the script may already use and replace
  // `param.grad`. So this method reads only gradients that the step keeps.
  bool match_peers() noexcept;

  // Params without a final gradient; and the unfinished params that got too few parts.
  std::vector<std::size_t> unfinished() const {
    return arrivals_.unfinished();
  }
  std::vector<std::size_t> missing() const {
    return arrivals_.missing();
  }
  const ArrivalTracker& arrivals() const {
    return arrivals_;
  }

  // The first thing that was wrong with the step. It is raised at the end of the step, so that
  // peers do not wait.
  const std::optional<UserError>& error() const {
    return error_ ? error_ : error_of_missing_;
  }

  // Makes `error`, about params without a gradient, the error of a step without another error.
  void report_missing(UserError error) {
    error_of_missing_ = std::move(error);
  }

  // A gradient of this param was added to `param.grad` after its final gradient was packed.
  void report_late(std::size_t param_index);

 private:
  using Indices = std::vector<std::size_t>;

  struct ParamState {
    std::optional<at::Tensor> kept;  // arrived, to be packed later
    bool moved = false;              // into its slot, in this step
    bool excluded = false;           // not written back: does not fit, or frozen
    uint32_t version = 0;            // of `kept`, when it arrived
  };
  struct BucketState {
    std::size_t outstanding;  // gradients that the bucket waits for, and the delay trigger
    bool when_full;           // all gradients are packed together when the last one arrives
    bool delayed;             // waits for the delay trigger, too
  };
  struct Held {
    GradVersions grads;
    std::vector<uint32_t> param_versions;  // empty if params may change
  };

  // Gradients on their way into buckets.
  void exclude_frozen();
  void unmark_dropped();
  void mark_param_ready(std::size_t param_index);
  void ensure_memory(Bucket& bucket);
  void pack_param(std::size_t param_index);
  bool check_fit(const Bucket& bucket, const Slot& slot, const at::Tensor& grad);
  void pack_together(std::size_t bucket_index);
  void pack_small(std::size_t bucket_index);
  void check_unchanged(std::size_t param_index, const at::Tensor& grad);
  void check_finite(Bucket& bucket);
  void count_down(std::size_t bucket_index);
  void complete(std::size_t bucket_index);
  void launch(std::size_t bucket_index);
  void move_into_bucket(std::size_t param_index);
  void keep(std::size_t param_index, at::Tensor grad);

  // The end of the step.
  void launch_agreements();
  void report_changed_grads();
  void report_early_updates();
  void compare_calls();
  void finalize_all();
  void finalize(std::size_t bucket_index);
  bool use_decides(const Slot& slot) const;
  void write_back_params_of_peers();
  void write_back(const Bucket& bucket, const std::vector<const Slot*>& slots);
  Indices launch_mispredicted();

  void report(UserError error);
  GradPlace place_in(const Bucket& bucket) const;

  ReducerContext& context_;
  StepCollectives collectives_;
  // Of gradients; nullopt where a hook divides, or what follows the reduction.
  const std::optional<int> divisor_;
  const Indices frozen_;
  ArrivalTracker arrivals_;
  Indices order_;  // params of arrivals, while the order counts
  std::vector<ParamState> params_;
  std::vector<BucketState> buckets_;
  LaunchQueue launches_;
  Held held_;                         // by hold_grads()
  bool grads_may_change_ = false;     // by the script, at any time; match_peers() on a device
  bool rest_launched_ = false;        // launch_rest() was called
  bool agreements_launched_ = false;  // launch_agreements() was called
  std::optional<UserError> error_;
  std::optional<UserError> error_of_missing_;
};

}  // namespace ddpx
