// The methods of StepRunner for a step without errors, and for its buckets.
#include "step_runner.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "../autograd/running_task.h"
#include "empty_step.h"

namespace ddpx {
namespace {

UserError static_graph_changed(
    const errors::Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  // The first sentences are torch's: scripts and tests look for them.
  return errors::at(
      where,
      "Expected to have finished reduction in the prior iteration before starting a new one. This "
      "error indicates that your training graph has changed in this iteration, e.g., one parameter "
      "is used in first iteration, but then got unused in the second iteration. this is not "
      "compatible with static_graph set to True.\n" +
          errors::indices_in_ddps_words(where, param_indices) + ". " +
          errors::count_params(names.size()) +
          " got fewer gradients than in the first synchronized backward with static_graph=True: " +
          join_names(names) +
          ". Remove static_graph=True, or pass find_unused_parameters=True instead.");
}

}  // namespace

StepRunner::StepRunner(ReducerContext& context, DistGrads& dist_grads)
    : context_(context), dist_grads_(dist_grads), forward_streams_(context.params.devices()) {}

// ---- a step -------------------------------------------------------------------------------------

void StepRunner::begin() {
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) through ReducerDDP: the gradients are averaged over ranks, "
        "but the graph of the gradients is local. Second-order gradients will not be averaged. "
        "Average second-order gradients with ReducerDDP.synchronized_grads().");
  }
  context_.observer.collect();
  if (running_task::is_distributed()) {
    dist_grads_.begin(context_.params.leaves());
  }
  context_.params.links().pull_all();
  step_.emplace(context_);
  context_.go_to(Phase::kCollecting);
  context_.emit(StepEvent::kStepBegin);
  if (!context_.progress.captured) {
    forward_streams_.wait();
  }
  step_->begin();
}

void StepRunner::arrive(std::size_t param_index) {
  const auto& param = context_.params.leaves()[param_index];
  if (dist_grads_.active()) {
    dist_grads_.remember_context();
    dist_grads_.pull(param);
  }
  context_.script_grads.early_updates.arrive(param_index, param);
  step_->arrive(param_index);
}

void StepRunner::end_backward(bool output_reached, const OutputWatch& outputs) {
  context_.emit(StepEvent::kBackwardEnd);
  context_.go_to(Phase::kFinalizing);
  report_missing(output_reached, outputs);
}

void StepRunner::finish() {
  try {
    step_->finish();
  } catch (const std::exception& error) {
    fail_with(error);
    throw;
  }
  const bool in_dist_context = dist_grads_.active();
  dist_grads_.end(context_.params.leaves(), /*averaged=*/true);
  context_.history.forward.record(step_->arrivals());
  context_.history.arrivals.learn(step_->arrivals());
  if (context_.options.average != Average::kMean && !in_dist_context) {
    context_.script_grads.kept.record(context_.params.leaves());
  }
  const auto error = step_->error();
  step_.reset();
  end_step();
  context_.emit(StepEvent::kStepEnd);
  context_.count_step();
  context_.emit(StepEvent::kIdle);
  // Raised last, when the reducer can be used again.
  if (error) {
    context_.guard.publish_fault(error->what());
    context_.raise(*error);
  }
}

void StepRunner::end_step() {
  context_.buckets.forget_streams();
  context_.progress.captured = false;
  context_.go_to(Phase::kIdle);
}

void StepRunner::run_empty() {
  context_.go_to(Phase::kCollecting);
  context_.history.had_forward = true;  // on the ranks with inputs
  context_.observer.peers().begin_step(context_.step_number());
  context_.go_to(Phase::kFinalizing);
  std::optional<UserError> error;
  try {
    error = EmptyStep(context_).run();
  } catch (const std::exception& fault) {
    fail_with(fault);
    throw;
  }
  end_step();
  context_.skip_step();
  context_.emit(StepEvent::kIdle);
  if (error) {
    context_.guard.publish_fault(error->what());
    context_.raise(*error);
  }
}

// ---- params without a gradient ------------------------------------------------------------------

// Delayed params may be unused, as in DDP.
StepRunner::Indices StepRunner::missing_at_end() const {
  if (context_.use_varies() ||
      (context_.history.arrivals.learning() && context_.options.mode != GraphMode::kDefault)) {
    return {};
  }
  auto missing = step_->missing();
  std::erase_if(missing, [this](std::size_t i) { return context_.params.metas()[i].delayed; });
  return missing;
}

// The step raises the error when it ends.
void StepRunner::report_missing(bool output_reached, const OutputWatch& outputs) {
  const auto missing = missing_at_end();
  if (missing.empty()) {
    return;
  }
  const auto where = context_.where();
  const auto& params = context_.params;
  if (context_.options.mode == GraphMode::kStatic) {
    step_->report_missing(static_graph_changed(where, params.names_of(missing), missing));
    return;
  }
  // Another output of the same forward may have brought them, or may still bring them.
  auto& forward = context_.history.forward;
  const auto nodes_to_come = outputs.nodes_to_come();
  Indices unused;
  Indices possibly_late;
  for (const auto param_index : missing) {
    if (output_reached && forward.arrived(param_index)) {
      continue;
    }
    const bool to_come = nodes_to_come.count(params.hooks()[param_index].accumulator()) != 0;
    (to_come ? possibly_late : unused).push_back(param_index);
  }
  forward.expect(std::move(possibly_late));
  if (!unused.empty()) {
    step_->report_missing(errors::params_without_gradient(where, params.names_of(unused), unused));
  }
}

// ---- buckets ------------------------------------------------------------------------------------

bool StepRunner::rebuild_if_due() {
  auto& order = context_.history.order;
  if (!order.due()) {
    return false;
  }
  rebuild([&] {
    auto agreed = context_.communicate(
        [&] { return order.agree(*context_.collective, context_.params.device()); },
        [] { return "the broadcast of the order in which gradients arrived"; });
    auto plan = context_.plan_by_arrival(agreed);
    order.retire(std::move(agreed));
    return plan;
  });
  return true;
}

void StepRunner::rebuild(const std::function<BucketPlan()>& agree) {
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  context_.go_to(Phase::kRebuilding);
  context_.emit(StepEvent::kRebuildBegin);
  try {
    // From now on peers have the new plan. If the allocation fails, recover() allocates for it. The
    // old buckets are dropped first, so that no step needs the memory of both.
    context_.buckets.install(agree(), {});
    context_.replace_buckets(context_.buckets.plan());
  } catch (...) {
    fail();
    throw;
  }
  context_.go_to(Phase::kIdle);
  context_.emit(StepEvent::kRebuildEnd);
}

void StepRunner::move_to(std::shared_ptr<Collective> collective, int64_t num_steps) {
  if (context_.progress.phase == Phase::kFailed) {
    // As recover(), but before the buckets are replaced: this reads the gradients in them.
    context_.buckets.wait_for_streams();
    if (!context_.params.device().is_cpu()) {
      context_.buckets.clear_in_flight(context_.params.tensors());
    }
  }
  context_.start_over(context_.options.mode, std::move(collective), num_steps);
  context_.progress.awaited.move_to(num_steps);
}

}  // namespace ddpx
