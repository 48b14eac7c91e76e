// A step of a rank that has run out of inputs.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "step_collectives.h"

namespace ddpx {

// In a join() context, a rank without inputs makes the calls of a step, so that the other ranks can
// make theirs. The rank sends zeros, and keeps its gradients. The whole step runs in one call.
//
// Owned by StepRunner::run_empty(), under the mutex of the context.
class EmptyStep {
 public:
  // `context` must outlive the step.
  explicit EmptyStep(ReducerContext& context);
  ~EmptyStep();
  EmptyStep(const EmptyStep&) = delete;
  EmptyStep& operator=(const EmptyStep&) = delete;

  // Makes all calls, and waits for them. Returns the error that all ranks find in the step.
  std::optional<UserError> run();

 private:
  void launch(std::size_t bucket_index);
  void wait(std::size_t bucket_index);

  ReducerContext& context_;
  StepCollectives collectives_;
  std::map<std::size_t, Bucket> zeros_;  // by bucket index
};

}  // namespace ddpx
