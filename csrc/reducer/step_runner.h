// Runs the steps of a reducer, from phase to phase.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../autograd/dist_grads.h"
#include "../autograd/output_watch.h"
#include "context.h"
#include "forward_streams.h"
#include "step.h"

namespace ddpx {

// The state machine of a reducer. The runner makes each change of phase, and owns the step while
// there is one. Reducer decides which backward makes a step. Step does the work of a step.
//
// step_runner.cpp has steps without errors, and the rebuild of buckets. step_runner_failure.cpp has
// steps that broke off. step_runner_manual.cpp has manual finalization.
//
// The reducer owns the runner. Every method needs the mutex of the context. A method releases the
// mutex while it waits for communication. `kA → kB` in a comment: the method may be called in phase
// kA, and leaves the reducer in phase kB.
class StepRunner {
 public:
  // Both must outlive this object.
  StepRunner(ReducerContext& context, DistGrads& dist_grads);

  // The step that runs, or awaits finalize(). Null if there is none.
  const Step* step() const {
    return step_ ? &*step_ : nullptr;
  }

  // To be called in each forward, on the thread of the caller.
  void remember_streams() {
    forward_streams_.remember();
  }

  // ---- a step ----

  // kIdle → kCollecting. To be called at the first gradient, or when a backward is known to bring
  // no gradient.
  void begin();

  // kCollecting. A gradient, or a part of a gradient, has arrived in `param.grad`.
  void arrive(std::size_t param_index);

  // kCollecting → kFinalizing. No further gradient of the step will come. `output_reached`: the
  // backward has reached one of `outputs`. Params that should have a gradient and have none are an
  // error of the step.
  void end_backward(bool output_reached, const OutputWatch& outputs);

  // kFinalizing → kIdle. Throws what was wrong with the step, when the next step may begin.
  void finish();

  // kIdle → kIdle. The step of a rank without gradients; see EmptyStep.
  void run_empty();

  // ---- manual finalization ----

  // kCollecting → kReady. Backward has ended. All calls of the step are made, so no peer waits for
  // this rank.
  void await_finalization(bool output_reached, const OutputWatch& outputs);

  // UserError if finalize() may not be called now. `begins`: a backward that will make a step has
  // brought no gradient yet.
  void check_can_finalize(bool begins) const;

  // kReady or kCollecting → kIdle, after check_can_finalize(). → kFinalized if the backward of the
  // step still runs.
  void finalize(bool in_backward, bool output_reached, const OutputWatch& outputs);

  // kFinalized → kIdle. The backward in which finalize() ran has ended. Without effect in other
  // phases.
  void leave_backward();

  // UserError in kReady: `call` would change gradients that are not averaged yet.
  void check_not_pending(const char* call) const;

  // A gradient has arrived between the end of one step and the start of another one. The gradient
  // is in `param.grad` already. UserError in kReady and kFinalized. Without effect in other phases.
  void refuse_grad(std::size_t param_index);

  // ---- buckets ----

  // kIdle → kIdle. Rebuilds the buckets by arrival order if that is due, which is a collective
  // call. Returns whether it rebuilt.
  bool rebuild_if_due();

  // kIdle → kIdle. Makes new buckets by the plan that `agree` returns, which is the same on all
  // ranks.
  void rebuild(const std::function<BucketPlan()>& agree);

  // kIdle or kFailed, without a change of phase. Moves to another group, with buckets as before the
  // first step.
  void move_to(std::shared_ptr<Collective> collective, int64_t num_steps);

  // ---- a step that broke off ----

  // kCollecting or kReady → kIdle, or kFailed. The backward broke off. Makes the calls that peers
  // wait for, if this rank can.
  void abandon() noexcept;

  // kCollecting → kIdle, or kFailed. No backward runs: the backward of the step ended without a
  // report. Throws an error that names the params whose gradients are missing.
  [[noreturn]] void drop_incomplete();

  // To be called in a catch block at the end of a backward or of a step. Tells peers of the error,
  // because they may wait for this rank.
  void fail_with(const std::exception& error);

  // kFailed → kIdle. Puts gradients and buckets in order for the next step. Without effect in other
  // phases.
  void recover_if_failed();

  // The same in a backward, if no forward has come since the last backward, which has raised.
  void recover_in_backward();

  // Any phase outside a backward → kIdle. The script gives the step up.
  void reset();

 private:
  using Indices = std::vector<std::size_t>;

  void end_step();
  Indices missing_at_end() const;
  void report_missing(bool output_reached, const OutputWatch& outputs);
  void fail(bool recovers = true) noexcept;
  void break_off();
  void recover();

  ReducerContext& context_;
  DistGrads& dist_grads_;
  ForwardStreams forward_streams_;
  std::optional<Step> step_;  // while a synchronized backward runs or awaits finalize()
};

}  // namespace ddpx
