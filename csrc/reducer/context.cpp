#include "context.h"

#include <c10/util/Exception.h>

#include <utility>

#include "../comm/different_calls.h"

namespace ddpx {

ReducerContext::ReducerContext(
    Params wrapped_params, ReducerOptions wrapped_options, std::shared_ptr<Collective> group)
    : options(std::move(wrapped_options)),
      collective(std::move(group)),
      params(std::move(wrapped_params)),
      buckets(initial_plan(options.mode)),
      arrivals(params.size(), options.mode),
      order(params.size(), /*wanted=*/options.mode != GraphMode::kFindUnused),
      use(params.size(), params.device()) {}

BucketPlan ReducerContext::initial_plan(GraphMode mode) const {
  auto plan = BucketPlan::initial(params.metas(), options.caps, mode);
  return options.delay_trigger ? plan.delayed_behind(params.metas(), *options.delay_trigger) : plan;
}

std::vector<Bucket> ReducerContext::allocate_buckets(const BucketPlan& plan) const {
  if (!communicates()) {
    return {};
  }
  return BucketSet::allocate(
      plan, params.tensors(), params.metas(), *collective, options.precision);
}

void ReducerContext::mark_used(std::size_t param_index) {
  if (use_is_exchanged() && params[param_index].grad().defined()) {
    use.map.mark(param_index);
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

std::string ReducerContext::describe_bucket(std::size_t bucket_index) const {
  return errors::bucket_all_reduce(
      bucket_index, params.names_of(buckets.plan().buckets()[bucket_index].param_indices));
}

void ReducerContext::raise(const UserError& error) {
  last_error = error.what();
  throw UserError(error);
}

// To be called in a catch block. Throws an InternalError as it is. If ranks are gone, the error
// names those ranks instead.
void ReducerContext::explain(const errors::Where& where, const std::string& what) const {
  const auto& peers = observer.peers();
  try {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const health::GroupFailed&) {
    peers.explain_error({});
  } catch (const DifferentCalls& cause) {
    peers.raise_mismatch(cause.how());
  } catch (const HookError& cause) {
    if (peers.group_failed()) {
      peers.explain_error(cause.what());
    }
  } catch (const c10::Error& cause) {
    peers.explain_error(cause.what_without_backtrace());
  } catch (const std::exception& cause) {
    peers.explain_error(cause.what());
  }
  try {
    throw;
  } catch (const c10::DistBackendError& cause) {
    // Rethrown as this type, because scripts catch it.
    const auto error = errors::communication_failed(where, what, cause.what_without_backtrace());
    throw c10::DistBackendError({__func__, __FILE__, __LINE__}, error.what());
  } catch (const c10::Error& cause) {
    throw errors::communication_failed(where, what, cause.what_without_backtrace());
  } catch (const std::exception& cause) {
    throw errors::communication_failed(where, what, cause.what());
  }
}

}  // namespace ddpx
