// One step of gradient reduction: pack, launch, wait, write back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <exception>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "../buckets/bucket.h"
#include "../buckets/packing.h"
#include "../comm/launch_queue.h"
#include "../observe/finite_check.h"
#include "../readiness/arrival_tracker.h"
#include "../readiness/bucket_countdown.h"
#include "context.h"

namespace ddpx {

// When the gradients of a bucket are packed.
enum class PackTime {
  kOnArrival,       // each gradient when it is final
  kWhenFull,        // all gradients together when the bucket has all of them (batched_copy)
  kIfMispredicted,  // at the end of backward, and only if some rank used the bucket after all; the
                    // bucket is not launched before
};

// All state of one step: from the first gradient of a synchronized backward to the last write-back.
// The reducer creates the step when it begins, and destroys the step when it ends or breaks off.
//
// Every method needs the mutex of the context. A method releases the mutex while it waits for
// communication or runs a communication hook. Threads of a backward call begin() and arrive(), and
// the thread that ends the backward calls launch_rest(), finish() or match_peers(). With manual
// finalization, any thread may call finish(). Any thread may call the const methods.
class Step {
 public:
  enum class Kind {
    kWithGrads,
    kWithoutGrads,  // this rank has run out of inputs (join()): it sends zeros and keeps its grads
  };

  // `context` must outlive the step.
  Step(ReducerContext& context, Kind kind);

  // Packs what is final from the start: gradients of frozen, and of unused params. A step without
  // gradients launches all its buckets.
  void begin();

  // A gradient, or a part of a gradient, has arrived in `param.grad`.
  void arrive(std::size_t param_index);

  // Backward has ended. Completes missing gradients from the present `param.grad`, so that peers
  // get correct means, and launches all buckets that are left. Without effect in a second call.
  // Throws the error of a launch that fails, or that has failed before.
  void launch_rest();

  // Calls launch_rest(), then waits for all buckets and writes the gradients back. Afterwards
  // error() returns the first error of the step. Throws the error of a launch or a wait that fails.
  void finish();

  // Whether finish() may run before backward has ended: all gradients are final, and all buckets
  // are launched.
  bool ready() const;

  // Backward broke off. If peers cannot know of that, because every bucket was launched, makes the
  // collective calls that peers make at the end of the step. Returns false if peers wait for this
  // rank. The first step has launched no bucket yet. On CPU, this method then launches all buckets
  // if every gradient has arrived.
  bool match_peers() noexcept;

  Kind kind() const {
    return kind_;
  }

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

  // Gradients on their way into buckets.
  void exclude_frozen();
  void unmark_dropped();
  void mark_param_ready(std::size_t param_index);
  void ensure_memory(Bucket& bucket);
  void pack_param(std::size_t param_index);
  void count_down(std::size_t bucket_index);
  void complete(std::size_t bucket_index);
  void launch_ready();
  void launch(std::size_t bucket_index);
  void move_into_bucket(std::size_t param_index);
  void keep(std::size_t param_index, at::Tensor grad);
  std::optional<at::Tensor> take_kept(std::size_t param_index);

  // The end of the step.
  void launch_agreements();
  void exchange_use();
  const std::vector<int32_t>& num_ranks_using();
  void finalize_all();
  void finalize(std::size_t bucket_index);
  bool use_decides(const Slot& slot) const;
  void write_back_params_of_peers();
  void write_back(const Bucket& bucket, const std::vector<const Slot*>& slots);
  Indices launch_mispredicted();
  void learn_use();
  void check_finite();
  void complete_order();
  void count_for_peers();

  void report(UserError error);
  Bucket& bucket(std::size_t bucket_index);
  PackTime pack_time_if_used(std::size_t bucket_index) const;
  bool predicted_unused(std::size_t bucket_index) const {
    return pack_times_[bucket_index] == PackTime::kIfMispredicted;
  }
  GradPlace place_in(const Bucket& bucket) const;

  ReducerContext& context_;
  const Kind kind_;
  const int divisor_;  // of gradients; 1 where a communication hook divides
  const Indices frozen_;
  ArrivalTracker arrivals_;
  Indices order_;                                // params of arrivals, while the order counts
  std::vector<std::optional<at::Tensor>> kept_;  // per param: arrived, to be packed later
  std::vector<bool> moved_;           // per param: moved into its slot in this step; or empty
  std::vector<bool> excluded_;        // per param: not written back (does not fit, or frozen)
  std::vector<PackTime> pack_times_;  // per bucket
  Indices delayed_;                   // buckets that also wait for the delay trigger
  BucketCountdown countdown_;
  LaunchQueue launches_;
  bool launching_ = false;               // a thread launches buckets, or a launch has failed
  std::exception_ptr launch_error_;      // of the launch that failed
  bool rest_launched_ = false;           // launch_rest() was called
  bool agreements_launched_ = false;     // launch_agreements() was called
  std::map<std::size_t, Bucket> zeros_;  // by bucket index; kWithoutGrads only
  std::optional<FiniteCheck> finite_check_;
  std::optional<UserError> error_;
  std::optional<UserError> error_of_missing_;
};

}  // namespace ddpx
