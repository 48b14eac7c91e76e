#include "context.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"
#include "../buckets/param_grad.h"
#include "../comm/different_calls.h"

namespace ddpx {
namespace {

constexpr auto* kDoNotUse = "\nDo not use the gradients of this step. ";

}  // namespace

ReducerContext::ReducerContext(
    Params wrapped_params, ReducerOptions wrapped_options, std::shared_ptr<Collective> group)
    : options(std::move(wrapped_options)),
      collective(std::move(group)),
      params(std::move(wrapped_params)),
      buckets(initial_plan(options.mode)),
      history(
          params.size(), params.device(), options.mode, options.rebuilds_buckets(options.mode)) {}

void ReducerContext::go_to(Phase next) {
  progress.phase = transition(progress.phase, next);
  observer.emit_phase(step_number(), static_cast<std::size_t>(next));
}

void ReducerContext::count_step() {
  history.use.static_use_known = true;
  ++progress.num_steps;
}

void ReducerContext::skip_step() {
  observer.clock().skip_step();
  count_step();
}

bool ReducerContext::is_captured() const {
  return progress.captured || is_capturing(params.device());
}

// ---- buckets ------------------------------------------------------------------------------------

BucketPlan ReducerContext::initial_plan(GraphMode mode) const {
  if (!options.listed_buckets.empty()) {
    return BucketPlan::listed(params.metas(), options.listed_buckets);
  }
  auto plan = BucketPlan::initial(params.metas(), options.caps, mode);
  return options.delay_trigger ? plan.delayed_behind(params.metas(), *options.delay_trigger) : plan;
}

BucketPlan ReducerContext::plan_by_arrival(
    const std::vector<std::size_t>& arrivals_in_order) const {
  auto plan = BucketPlan::by_arrival(params.metas(), options.caps, arrivals_in_order);
  return options.delay_trigger ? plan.delayed_behind(params.metas(), *options.delay_trigger) : plan;
}

std::vector<Bucket> ReducerContext::allocate(const BucketPlan& plan, Collective& group) const {
  if (!communicates_over(group)) {
    return {};
  }
  std::vector<Bucket> allocated;
  for (const auto& spec : plan.buckets()) {
    const bool sparse = params.metas()[spec.param_indices.front()].expect_sparse;
    auto& bucket = allocated.emplace_back(
        spec, params.tensors(), sparse, group, options.precision, options.lazy_buckets);
    bucket.pack_small_together(options.batched_copy ? 0 : options.small_grad_bytes);
  }
  return allocated;
}

void ReducerContext::install(BucketPlan plan, std::vector<Bucket> allocated) {
  const at::NoGradGuard no_grad;
  observer.emit_plan(step_number(), plan);
  const bool views = options.gradient_as_bucket_view;
  std::vector<std::size_t> kept;
  if (views) {
    kept = script_grads.kept.pop_unchanged(params.leaves());
    params.links().pull_all();
    if (options.lazy_buckets) {
      // The new buckets have no memory, and reductions of a failed step write into the old buckets.
      buckets.move_out_grads(params.tensors());
    }
  }
  buckets.install(std::move(plan), std::move(allocated));
  publish_bucket_names();
  if (views) {
    buckets.take_grads(params.tensors());
    params.links().push_all();
    script_grads.kept.record(params.leaves(), kept);
  }
}

void ReducerContext::replace_buckets(BucketPlan plan) {
  auto allocated = allocate(plan, *collective);
  install(std::move(plan), std::move(allocated));
}

void ReducerContext::start_over(
    GraphMode mode, std::shared_ptr<Collective> group, int64_t steps_ended) {
  auto plan = initial_plan(mode);
  auto allocated = allocate(plan, *group);
  options.mode = mode;
  progress.num_steps = steps_ended;
  collective = std::move(group);
  const auto used = std::move(history.use.map);
  history.start_over(params.device(), mode, options.rebuilds_buckets(mode));
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (used.marked(i) && grad_of(params.leaves()[i]).defined()) {
      history.use.map.mark(i);  // the gradient of a local backward stays
    }
  }
  script_grads.taken.clear();
  if (!weights.has_grads() && !weights.has_lost()) {
    weights.forget();
  }
  weights.replace_unread(std::nullopt);
  install(std::move(plan), std::move(allocated));
}

void ReducerContext::publish_bucket_names() {
  if (!observer.peers().monitor()) {
    return;
  }
  std::vector<std::vector<std::string>> names;
  for (const auto& spec : buckets.plan().buckets()) {
    names.push_back(params.names_of(spec.param_indices));
  }
  observer.peers().name_buckets(std::move(names));
}

std::string ReducerContext::describe_bucket(std::size_t bucket_index) const {
  const auto names = params.names_of(buckets.plan().buckets()[bucket_index].param_indices);
  const std::string call =
      settings.comm_hook_is_registered ? "the communication hook" : "the all-reduce";
  return call + " of bucket " + std::to_string(bucket_index) + " (" + join_names(names) + ")";
}

// ---- gradients ----------------------------------------------------------------------------------

void ReducerContext::mark_used(std::size_t param_index) {
  if (use_is_exchanged()) {
    mark_if_grad(param_index);
  }
}

void ReducerContext::mark_used_locally(std::size_t param_index) {
  if (use_is_exchanged() || options.mode == GraphMode::kDefault) {
    mark_if_grad(param_index);
  }
}

void ReducerContext::mark_if_grad(std::size_t param_index) {
  if (grad_of(params[param_index]).defined()) {
    history.use.map.mark(param_index);
  }
}

void ReducerContext::cast_grad_to_local(std::size_t param_index) const {
  const auto& param = params[param_index];
  cast_grad(param, options.precision.of(param.scalar_type()).local);
}

void ReducerContext::cast_grad_to_averaged(std::size_t param_index) const {
  const auto& param = params[param_index];
  cast_grad(param, options.precision.of(param.scalar_type()).averaged);
}

void ReducerContext::add_stream_of(std::size_t param_index) {
  if (communicates()) {
    buckets.of(param_index).add_stream();
  }
}

// ---- errors -------------------------------------------------------------------------------------

// The reducer is idle until the first gradient of a backward arrives. Errors count this time as
// part of backward.
errors::Where ReducerContext::where() const {
  const auto phase = progress.phase;
  const bool begins = phase == Phase::kIdle && running_task::in_backward();
  return {collective->rank(), progress.num_steps, begins ? Phase::kCollecting : phase};
}

void ReducerContext::raise(const UserError& raised) {
  progress.last_error = raised.what();
  throw UserError(raised);
}

// To be called in a catch block. Throws an InternalError as it is. If ranks are gone, the error
// names those ranks instead.
void ReducerContext::explain(const errors::Where& where, const std::string& what) const {
  const auto failed = [&](const char* cause) {
    return errors::at(
        where,
        what + " failed: " + cause + kDoNotUse +
            "Another rank may have died or raised an error: read the output of the other ranks "
            "first.");
  };
  try {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const health::GroupFailed& cause) {
    guard.explain_error({});
    throw failed(cause.what());
  } catch (const DifferentCalls& cause) {
    guard.raise_mismatch(cause.how());
    throw failed(cause.what());
  } catch (const HookError& cause) {
    if (cause.may_be_of_call() || guard.failed()) {
      guard.explain_error(cause.what());
    }
    cause.raise_own(errors::at(where, what + " raised this error").what());
    throw errors::at(
        where,
        what + " raised: " + cause.what() + kDoNotUse +
            "If a collective call of the hook failed, another rank may have died or raised an "
            "error: read the output of the other ranks.");
  } catch (const c10::DistBackendError& cause) {
    guard.explain_error(cause.what_without_backtrace());
    // Rethrown as this type, because scripts catch it.
    const auto error = failed(cause.what_without_backtrace());
    throw c10::DistBackendError({__func__, __FILE__, __LINE__}, error.what());
  } catch (const c10::Error& cause) {
    guard.explain_error(cause.what_without_backtrace());
    throw failed(cause.what_without_backtrace());
  } catch (const std::exception& cause) {
    guard.explain_error(cause.what());
    throw failed(cause.what());
  }
}

}  // namespace ddpx
