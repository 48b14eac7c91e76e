#include "empty_step.h"

namespace ddpx {

namespace {

// A rank without inputs has the weight 0.
std::optional<WeightSum> no_weight(const ReducerContext& context) {
  return context.options.average == Average::kWeights
             ? std::make_optional<WeightSum>(Weights().take(context.params.device()))
             : std::nullopt;
}

}  // namespace

EmptyStep::EmptyStep(ReducerContext& context)
    : context_(context), collectives_(context, no_weight(context)) {}

EmptyStep::~EmptyStep() {
  for (const auto& [bucket_index, zeros] : zeros_) {
    zeros.keep_for_streams();  // after an error, some may be in flight
  }
}

std::optional<UserError> EmptyStep::run() {
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    if (!collectives_.predicted_unused(b)) {
      launch(b);
    }
  }
  context_.history.complete_order(context_.options.mode, {});
  collectives_.exchange_use();
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    if (!collectives_.predicted_unused(b)) {
      wait(b);
    }
  }
  const auto mispredicted = collectives_.take_mispredicted();
  for (const auto bucket_index : mispredicted) {
    launch(bucket_index);
  }
  for (const auto bucket_index : mispredicted) {
    wait(bucket_index);
  }
  collectives_.learn_use();
  auto error = collectives_.finite_error();
  auto of_weights = collectives_.weight_error();
  return error ? std::move(error) : std::move(of_weights);
}

void EmptyStep::launch(std::size_t bucket_index) {
  auto& zeros =
      zeros_
          .emplace(
              bucket_index, context_.buckets[bucket_index].zeros_like(context_.params.tensors()))
          .first->second;
  collectives_.launch(bucket_index, zeros);
}

void EmptyStep::wait(std::size_t bucket_index) {
  context_.observer.peers().publish(health::Doing::kWaiting, bucket_index);
  collectives_.wait(bucket_index, zeros_.at(bucket_index));
}

}  // namespace ddpx
