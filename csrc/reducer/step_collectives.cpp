#include "step_collectives.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <string>
#include <utility>

namespace ddpx {
namespace {

UserError gradients_not_finite(
    const errors::Where& where, const std::vector<std::pair<int, std::string>>& findings) {
  std::string params;
  std::string ranks;
  for (const auto& [rank, name] : findings) {
    params += (params.empty() ? "'" : ", '") + name + "' on rank " + std::to_string(rank);
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  const auto count = findings.size();
  return errors::at(
      where,
      "gradients contain NaN or infinity, first in " + params +
          ". The averages of these gradients are not finite on any rank. Check the inputs and the "
          "loss of " +
          errors::by_number(count, "rank ", "ranks ") + ranks +
          ". torch.autograd.set_detect_anomaly(True) names the operation at fault. A gradient "
          "scaler skips such steps: if the script uses a gradient scaler, turn off this check with "
          "set_check_finite(False).");
}

}  // namespace

StepCollectives::StepCollectives(ReducerContext& context, std::optional<WeightSum> weight)
    : context_(context), weights_(std::move(weight)) {
  const auto& plan = context_.buckets.plan().buckets();
  for (std::size_t b = 0; b < context_.buckets.size(); ++b) {
    unused_.push_back(context_.history.use.predicts_unused(plan[b]));
  }
  if (context_.settings.check_finite) {
    finite_check_.emplace();
  }
  for (const auto& [param_index, rows] : context_.settings.sparse_rows) {
    if (context_.communicates()) {
      context_.buckets.of(param_index).set_rows(rows);
    }
  }
}

// ---- buckets ------------------------------------------------------------------------------------

void StepCollectives::launch(std::size_t bucket_index, Bucket& bucket) {
  if (weights_ && !weights_->launched()) {
    context_.communicate([&] { weights_->launch(*context_.collective); }, errors::weight_sum);
  }
  const auto& hook = context_.settings.comm_hook;
  // The device passes a recorded launch when the gradients of all streams are packed.
  bucket.prepare_launch();
  context_.emit(StepEvent::kLaunched, bucket_index);
  context_.observer.peers().publish_launch(
      bucket_index, bucket.num_bytes(), static_cast<int>(bucket.dtypes().summed));
  if (hook) {
    context_.emit(StepEvent::kHookBegin, bucket_index);
  }
  context_.communicate(
      [&] {
        if (hook) {
          bucket.launch(*hook, bucket_index, context_.buckets.size(), context_.params.tensors());
        } else {
          bucket.launch(*context_.collective);
        }
      },
      [&] { return context_.describe_bucket(bucket_index); });
  if (hook) {
    context_.emit(StepEvent::kHookEnd);
  }
  context_.observer.follow(bucket.reduction(), context_.step_number(), bucket_index);
}

void StepCollectives::wait(std::size_t bucket_index, Bucket& bucket) {
  context_.communicate(
      [&] { bucket.wait(*context_.collective); },
      [&] { return context_.describe_bucket(bucket_index); });
  if (context_.options.average != Average::kMean) {
    divide(bucket);
  }
}

// A communication hook gives the mean over ranks, an all-reduce the sum.
void StepCollectives::divide(Bucket& bucket) {
  const double num_ranks = context_.settings.comm_hook ? context_.collective->world_size() : 1;
  if (!weights_) {
    if (num_ranks != 1) {
      const auto options = at::TensorOptions(at::kDouble).device(bucket.device());
      bucket.divide_reduced(at::full({1}, 1 / num_ranks, options));
    }
    return;
  }
  context_.communicate([&] { weights_->wait(*context_.collective); }, errors::weight_sum);
  const auto& sum = weights_->divisor();
  bucket.divide_reduced(num_ranks == 1 ? sum : sum.div(num_ranks));
}

std::optional<UserError> StepCollectives::weight_error() {
  if (!weights_ || context_.progress.captured) {
    return std::nullopt;
  }
  auto& weights = context_.weights;
  const auto last = weights.replace_unread(weights_->unread(context_.where()));
  auto error = last ? last->error() : weights_->error(context_.where());
  if (!error && finite_check_) {
    if (const auto unread = weights.replace_unread(std::nullopt)) {
      error = unread->error();
    }
  }
  if (weights.took_too_much() && !error) {
    error = context_.error(
        "the gradients of the wrapper of " + context_.options.module_name +
        " were divided by the weights of all forwards since the last averaged backward, but no "
        "backward has reached an output of one of these forwards. All gradients of this step are "
        "too small. Run a forward that needs no backward in torch.no_grad(), or set its weight to "
        "0. Average the outputs of several forwards in one backward, or run all but the last "
        "backward in model.no_sync(). To skip a backward, call ddpx.reset(model) and clear the "
        "gradients.");
  }
  return error;
}

// ---- the use of params --------------------------------------------------------------------------

void StepCollectives::exchange_use() {
  if (!context_.use_is_exchanged()) {
    return;
  }
  auto& use = context_.history.use;
  context_.emit(StepEvent::kUseAgreement);
  for (const auto param_index : use.prediction.nested()) {
    use.map.mark_nested(param_index);
  }
  context_.communicate([&] { use.map.launch(*context_.collective); }, errors::used_map_exchange);
  use.last_sums = use.map.last_sums();
}

const std::vector<int32_t>& StepCollectives::num_ranks_using() {
  auto& use = context_.history.use;
  const auto& users = context_.communicate(
      [&]() -> const auto& { return use.map.num_ranks_using(); }, errors::used_map_exchange);
  if (!use.last_sums.of_ranks.is_same(use.map.last_sums().of_ranks)) {
    use.last_sums = use.map.last_sums();
  }
  return users;
}

std::vector<std::size_t> StepCollectives::take_mispredicted() {
  std::vector<std::size_t> mispredicted;
  for (std::size_t b = 0; b < unused_.size(); ++b) {
    if (!unused_[b]) {
      continue;
    }
    const auto& users = num_ranks_using();
    const auto& members = context_.buckets.plan().buckets()[b].param_indices;
    if (std::any_of(members.begin(), members.end(), [&](auto i) { return users[i] != 0; })) {
      mispredicted.push_back(b);
      unused_[b] = false;
    }
  }
  return mispredicted;
}

// All ranks learn the same: either all ranks read the used-map, or some rank used every param, and
// the ranks that read the map find no unused param.
void StepCollectives::learn_use() {
  auto& use = context_.history.use;
  if (!context_.use_varies()) {
    if (context_.options.mode == GraphMode::kDefault) {
      use.map.clear();  // marks of local backwards, whose gradients are averaged now
    }
    return;
  }
  if (context_.options.skip_unused_buckets && context_.communicates()) {
    for (std::size_t i = 0; i < use.unused_streaks.size(); ++i) {
      use.unused_streaks[i].learn(use.map.marked(i) || num_ranks_using()[i] != 0);
    }
  }
  if (const auto& nesting = use.map.num_ranks_nesting(); !nesting.empty()) {
    use.prediction.learn_from_ranks(num_ranks_using(), nesting);
  }
  use.map.clear();
  use.last_sums = use.map.last_sums();
}

// ---- finite gradients ---------------------------------------------------------------------------

void StepCollectives::launch_finite_check() {
  if (finite_check_) {
    context_.communicate(
        [&] { finite_check_->launch(*context_.collective, context_.params.device()); },
        errors::finite_check);
  }
}

std::optional<UserError> StepCollectives::finite_error() {
  if (!finite_check_) {
    return std::nullopt;
  }
  const auto findings = context_.communicate(
      [&] { return finite_check_->agree(*context_.collective, context_.params.device()); },
      errors::finite_check);
  std::vector<std::pair<int, std::string>> named;
  for (const auto& finding : findings) {
    named.emplace_back(finding.rank, context_.params.name(finding.param_index));
  }
  return named.empty() ? std::nullopt
                       : std::make_optional(gradients_not_finite(context_.where(), named));
}

}  // namespace ddpx
