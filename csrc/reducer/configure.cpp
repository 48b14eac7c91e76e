#include "configure.h"

#include <utility>

namespace ddpx {
namespace {

void refuse_second_hook(ReducerContext& context) {
  if (context.settings.comm_hook) {
    context.raise(
        "register_comm_hook or register_builtin_comm_hook can only be called once. Combine the "
        "hooks into one function, or wrap the module again.");
  }
}

// Without `precision`, the precision stays. A failed allocation changes nothing.
void install_comm_hook(
    ReducerContext& context,
    std::shared_ptr<CommHook> hook,
    const std::optional<Precision>& precision) {
  refuse_second_hook(context);  // another thread may have registered a hook meanwhile
  const bool keeps_buckets = context.communicates() && !precision;
  const auto before = context.options.precision;
  context.options.precision = precision.value_or(before);
  context.settings.comm_hook = std::move(hook);
  context.settings.comm_hook_is_registered = !precision;
  try {
    if (!keeps_buckets) {
      context.replace_buckets(context.buckets.plan());
    }
  } catch (...) {
    context.options.precision = before;
    context.settings.comm_hook.reset();
    context.settings.comm_hook_is_registered = false;
    throw;
  }
}

}  // namespace

void set_comm_hook(Reducer& reducer, std::shared_ptr<CommHook> hook) {
  reducer.change(refuse_second_hook);  // also within a backward, as in DDP
  reducer.change_between_steps("register_comm_hook()", [&](ReducerContext& context) {
    install_comm_hook(context, std::move(hook), std::nullopt);
  });
}

void set_mixed_precision(Reducer& reducer, Precision precision, std::shared_ptr<CommHook> hook) {
  reducer.change(refuse_second_hook);
  reducer.change_between_steps("register_comm_hook()", [&](ReducerContext& context) {
    install_comm_hook(context, std::move(hook), precision);
  });
}

void set_divisor(Reducer& reducer, std::optional<int> divisor) {
  reducer.change([&](ReducerContext& context) { context.settings.set_divisor(divisor); });
}

void set_sparse_rows(Reducer& reducer, const std::map<std::size_t, at::Tensor>& rows) {
  reducer.change(
      [&](ReducerContext& context) { context.settings.set_sparse_rows(context.params, rows); });
}

void set_check_finite(Reducer& reducer, bool enabled) {
  reducer.change_between_steps("set_check_finite()", [&](ReducerContext& context) {
    context.settings.check_finite = enabled;
  });
}

void set_after_sync(Reducer& reducer, std::function<void()> after_sync) {
  reducer.change([&](ReducerContext& context) {
    context.settings.after_sync.swap(after_sync);  // the old one is destroyed without the mutex
  });
}

void add_recording(Reducer& reducer, std::shared_ptr<Recording> recording) {
  reducer.change_between_steps("ddpx.record()", [&](ReducerContext& context) {
    context.observer.add_recording(
        std::move(recording), context.step_number(), context.buckets.plan());
  });
}

void remove_recording(Reducer& reducer, const std::shared_ptr<Recording>& recording) {
  reducer.change([&](ReducerContext& context) { context.observer.remove_recording(recording); });
}

void set_sample_rate(Reducer& reducer, int64_t sample_rate) {
  if (sample_rate < 1) {
    throw errors::not_positive("the sample rate", sample_rate);
  }
  reducer.change(
      [&](ReducerContext& context) { context.observer.clock().set_sample_rate(sample_rate); });
}

void number_as_constructed(Reducer& reducer) {
  reducer.change([](ReducerContext& context) {
    context.observer.peers().number_as_constructed();
    context.emit(StepEvent::kIdle);
  });
}

void mark_waited(Reducer& reducer) {
  reducer.change([](ReducerContext& context) {
    context.progress.awaited.mark_waited(context.progress.num_steps);
  });
}

}  // namespace ddpx
