#include "capture_checks.h"

#include <string>

#include "../buckets/device_stream.h"

namespace ddpx {
namespace {

UserError not_capturable(
    const errors::Where& where, const std::string& reason, const std::string& remedy) {
  return errors::at(where, "a step is captured into a CUDA graph, but " + reason + " " + remedy);
}

}  // namespace

void refuse_capture(const ReducerContext& context, bool averages) {
  const auto where = context.where();
  const auto host_read = [&](const std::string& option) {
    return not_capturable(
        where,
        option + " reads results on the host. A CUDA graph cannot repeat reads on the host.",
        "Turn off " + option + " for the captured steps.");
  };
  if (context.observer.recorded() && !is_capturing(context.params.device())) {
    throw not_capturable(
        where,
        "a recording runs. With torch before 2.12, a recording asks the device for times during "
        "the capture.",
        "End the recording before the capture.");
  }
  if (averages && context.settings.check_finite) {
    throw host_read("set_check_finite()");
  }
  if (averages && context.options.mode == GraphMode::kFindUnused) {
    throw host_read("find_unused_parameters");
  }
  if (!context.communicates()) {
    return;
  }
  if (averages && context.weights.has_number()) {
    throw not_capturable(
        where,
        "a weight of this step is a number. The graph would repeat the number.",
        "Pass a tensor on the device: ddpx.set_weight(model, tensor).");
  }
  const auto& metas = context.params.metas();
  for (std::size_t i = 0; averages && i < metas.size(); ++i) {
    if (metas[i].expect_sparse) {
      throw not_capturable(
          where,
          "the gradient of parameter '" + context.params.name(i) +
              "' is sparse. The host reads the size of a sparse gradient, and a CUDA graph cannot "
              "repeat reads on the host.",
          "Make the gradient dense: torch.nn.Embedding(..., sparse=False).");
    }
  }
  if (context.history.order.due() || (averages && context.history.order.wanted())) {
    throw not_capturable(
        where,
        "the first steps of this wrapper have not ended. The buckets change after these steps, and "
        "a CUDA graph would write into the old buckets.",
        "Run at least 3 training steps on the capturing stream before the capture.");
  }
}

void refuse_join_capture(const ReducerContext& context, bool captured) {
  if (captured || is_capturing(context.params.device())) {
    throw not_capturable(
        context.where(),
        "in a join() context, ranks exchange in each forward whether they have inputs. A CUDA "
        "graph cannot repeat the decisions that follow.",
        "Capture outside join(). After join(divide_by_initial_world_size=False), wrap the module "
        "again before a capture.");
  }
}

}  // namespace ddpx
