// The methods of Reducer for settings, observers and state.
#include <optional>
#include <utility>

#include "reducer.h"

namespace ddpx {

// ---- settings -----------------------------------------------------------------------------------

void Reducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const auto lock = lock_between_steps();
  install_comm_hook(std::move(hook), std::nullopt);
}

void Reducer::set_mixed_precision(Precision precision, std::shared_ptr<CommHook> hook) {
  const auto lock = lock_between_steps();
  install_comm_hook(std::move(hook), precision);
}

// Without `precision`, the precision stays. A failed allocation changes nothing.
void Reducer::install_comm_hook(
    std::shared_ptr<CommHook> hook, const std::optional<Precision>& precision) {
  if (context_.settings.comm_hook) {
    raise(
        "register_comm_hook or register_builtin_comm_hook can only be called once. Combine the "
        "hooks into one function, or wrap the module again.");
  }
  check_idle("register_comm_hook()");
  const bool keeps_buckets = context_.communicates() && !precision;
  const auto before = context_.options.precision;
  context_.options.precision = precision.value_or(before);
  context_.settings.comm_hook = std::move(hook);
  context_.settings.comm_hook_is_registered = !precision;
  try {
    if (!keeps_buckets) {
      context_.replace_buckets(context_.buckets.plan());
    }
  } catch (...) {
    context_.options.precision = before;
    context_.settings.comm_hook.reset();
    throw;
  }
}

void Reducer::set_divisor(std::optional<int> divisor) {
  const auto lock = context_.mutex.lock();
  context_.settings.set_divisor(divisor);
}

void Reducer::set_sparse_rows(std::size_t param_index, const at::Tensor& rows) {
  const auto lock = context_.mutex.lock();
  context_.settings.set_sparse_rows(context_.params, param_index, rows);
}

void Reducer::set_check_finite(bool enabled) {
  const auto lock = lock_between_steps();
  check_idle("set_check_finite()");
  context_.settings.check_finite = enabled;
}

void Reducer::set_manual_finalization(bool required) {
  const auto lock = lock_between_steps();
  if (required == context_.settings.manual_finalization) {
    return;
  }
  check_not_pending("a change of require_manual_backward_finalization");
  recover_if_failed();
  if (context_.progress.phase != Phase::kIdle || forward_.awaits_backward() || !scope_.empty()) {
    raise(
        "require_manual_backward_finalization cannot be changed after forward while a backward "
        "pass is expected or in progress. Set it before forward or after backward finalization. If "
        "the last forward has no backward, call model.reset() first.");
  }
  context_.settings.manual_finalization = required;
}

void Reducer::set_after_sync(std::function<void()> after_sync) {
  const auto lock = context_.mutex.lock();
  after_sync_.swap(after_sync);  // the old function is destroyed without the lock
}

void Reducer::set_static_graph() {
  const auto lock = lock_between_steps();
  if (context_.options.mode == GraphMode::kStatic) {
    return;
  }
  check_idle("_set_static_graph()");
  check_outside_backward("_set_static_graph()");
  if (!context_.history.arrivals.learning()) {
    raise(
        "_set_static_graph() should be called before training loop starts. The first synchronized "
        "backward of this wrapper has ended already. Pass static_graph=True when wrapping.");
  }
  context_.start_over(GraphMode::kStatic, context_.collective, context_.progress.num_steps);
  forward_.restart();
}

void Reducer::prepare_for_backward() {
  const auto lock = lock_after_abort();
  check_outside_backward("prepare_for_backward()");
  check_not_pending("prepare_for_backward()");
  if (joined_step_ == JoinedStep::kLocal || joined_step_ == JoinedStep::kUnannounced) {
    throw context_.error(
        "prepare_for_backward() was called in a join() context, without a forward outside "
        "no_sync() before it. Ranks without inputs learn at forward whether a step averages "
        "gradients. Run the last forward of the step outside no_sync().");
  }
  backward_sync_.prepare();
  context_.params.add_pre_hooks(weak_from_this());
}

void Reducer::remove_hooks() {
  const auto lock = lock_after_abort();
  check_not_pending("_remove_autograd_hooks()");
  recover_if_failed();
  if (context_.progress.phase != Phase::kIdle || in_backward()) {
    throw context_.error(
        "hooks cannot be removed while a backward runs. Remove the hooks between steps.");
  }
  context_.params.remove_hooks();
  forward_.restart();  // no later gradient is seen
}

void Reducer::set_collective(
    std::shared_ptr<Collective> collective,
    std::optional<int64_t> num_steps,
    std::shared_ptr<health::Monitor> monitor) {
  std::shared_ptr<Collective> before;  // destroyed without the mutex: a group joins its threads
  const auto lock = lock_after_abort();
  check_outside_backward("_update_process_group()");
  if (context_.progress.phase != Phase::kFailed) {
    check_idle("_update_process_group()");
  }
  before = context_.collective;
  context_.start_over(
      context_.options.mode,
      std::move(collective),
      num_steps.value_or(context_.progress.num_steps));
  forward_.restart();
  awaited_.move_to(context_.progress.num_steps);
  publish_to(std::move(monitor));
  recover_if_failed();
}

// ---- observers and state ------------------------------------------------------------------------

void Reducer::add_recording(std::shared_ptr<Recording> recording) {
  const auto lock = lock_between_steps();
  check_idle("ddpx.record()");
  context_.observer.add_recording(
      std::move(recording), context_.step_number(), context_.buckets.plan());
}

void Reducer::remove_recording(const std::shared_ptr<Recording>& recording) {
  const auto lock = context_.mutex.lock();
  context_.observer.remove_recording(recording);
}

void Reducer::set_sample_rate(int64_t sample_rate) {
  if (sample_rate < 1) {
    throw errors::not_positive("the sample rate", sample_rate);
  }
  const auto lock = context_.mutex.lock();
  context_.observer.clock().set_sample_rate(sample_rate);
}

void Reducer::number_as_constructed() {
  const auto lock = lock_after_abort();
  context_.observer.peers().number_as_constructed();
  emit(StepEvent::kIdle);
}

std::vector<int32_t> Reducer::used_by_ranks() {
  const auto lock = context_.mutex.lock();
  auto& use = context_.history.use;
  // A thread that finalizes a step may wait for this one, as for the continuation of a hook's
  // future. With manual finalization, a backward may launch the map without an occupation.
  const bool may_be_launched =
      context_.progress.phase == Phase::kCollecting && context_.settings.manual_finalization;
  if (!context_.mutex.occupied_by_other() && !may_be_launched) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    context_.communicate([&] { use.map.wait(); }, errors::used_map_exchange);
    use.last_sums = use.map.last_sums();
  }
  return context_.communicate(
      [sums = use.last_sums] { return sums.num_ranks_using(); }, errors::used_map_exchange);
}

std::vector<std::string> Reducer::missing_params() {
  const auto lock = context_.mutex.try_lock();
  return lock && context_.progress.phase == Phase::kCollecting && step_
             ? context_.params.names_of(step_->missing())
             : std::vector<std::string>();
}

}  // namespace ddpx
