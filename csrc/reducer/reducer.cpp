#include "reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "../buckets/slot_io.h"

namespace ddpx {

// ---- gradients arrive --------------------------------------------------------------------------

void Reducer::on_output_grad(ForwardSync forward) {
  const auto lock = enter();
  note(EventKind::kBackwardBegin);
  if (!sync_enabled_ && joined_step_ == JoinedStep::kAverages && forward == ForwardSync::kOn &&
      BackwardScope::runs_whole_graph()) {
    throw errors::joined_step_is_local(where());
  }
  if (!sync_enabled_ || hooks_.empty()) {
    if (!recordings_.empty()) {
      scope_.join(weak_from_this());  // to note when it ends
    }
    return;
  }
  scope_.join(weak_from_this());  // to forget what is noted here when it ends or dies
  backward_sync_.reach_output(forward);
  if (backward_sync_.local()) {
    return;
  }
  Indices asked_for;
  for (std::size_t i = 0; i < hooks_.size() && !BackwardScope::runs_whole_graph(); ++i) {
    if (BackwardScope::returns_grad_of(hooks_[i].accumulator())) {
      asked_for.push_back(i);
    }
  }
  if (!asked_for.empty()) {
    throw backward_sync_.prepared() ? errors::grads_taken_away(where(), names_of(asked_for))
                                    : errors::autograd_grad_of_params(where(), names_of(asked_for));
  }
  const auto local_arrivals = backward_sync_.take_local_arrivals();
  if (phase_ == Phase::kIdle) {
    search_unused();  // here, where the outermost graph task runs
  }
  if (phase_ == Phase::kIdle && (!local_arrivals.empty() || reaches_nothing())) {
    begin_step();  // peers launch their buckets in the middle of backward: so must this rank
    join_arrivals();
  }
  for (const auto param_index : local_arrivals) {
    links_.pull(param_index);  // pushed by an earlier arrival of the same param
    arrive(param_index);
  }
}

// Once per backward: asks the first of its graph tasks that was joined.
void Reducer::search_unused() {
  if (options_.mode == GraphMode::kFindUnused && !scope_.contains(unused_search_.task_id())) {
    unused_search_.look(hooks_);
  }
}

// Whether the backward on this thread is known to bring no gradient at all.
bool Reducer::reaches_nothing() const {
  return options_.mode == GraphMode::kFindUnused && !arrivals_.learning() &&
         BackwardScope::runs_whole_graph() && !all_frozen() && unused_search_.reaches_nothing();
}

void Reducer::on_grad(std::size_t param_index) {
  const auto lock = enter();
  if (phase_ == Phase::kFailed) {
    recover();
  }
  links_.pull(param_index);
  if (phase_ == Phase::kIdle && (!sync_enabled_ || backward_sync_.local())) {
    mark_used(param_index);
    if (options_.mode == GraphMode::kFindUnused) {
      unused_search_.note_local_arrival(param_index);
    }
    cast_to_local_dtype(param_index);
    links_.push(param_index);
    if (sync_enabled_) {
      backward_sync_.keep_local(param_index);
      note_stream_of(param_index);
    }
    return;
  }
  scope_.join(weak_from_this());  // first, so that an error in what follows is reported as abort
  if (phase_ == Phase::kIdle) {
    search_unused();
    unused_search_.note_arrival(param_index);  // first: a nested arrival tells of other params, too
    begin_step();
  }
  arrive(param_index);
}

// autograd.grad() takes the gradient of a param away, in the backward that prepare_for_backward()
// was called for.
void Reducer::on_grad_to_come(std::size_t param_index) {
  if (BackwardScope::runs_whole_graph()) {
    return;
  }
  const auto lock = enter();
  if (sync_enabled_ && backward_sync_.prepared() && param_index < hooks_.size() &&
      BackwardScope::returns_grad_of(hooks_[param_index].accumulator())) {
    scope_.join(weak_from_this());
    throw errors::grads_taken_away(where(), names_of({param_index}));
  }
}

void Reducer::arrive(std::size_t param_index) {
  note(EventKind::kGradArrived, param_index);
  mark_used(param_index);
  unused_search_.note_arrival(param_index);
  if (finite_check_) {
    finite_check_->note_arrival(param_index);
  }
  switch (arrivals_.arrive(param_index)) {
    case Arrival::kFinal:
      order_.record(param_index);
      if (!arrived_grads_.empty()) {
        arrived_grads_.erase(param_index);
      }
      accept(param_index);
      break;
    case Arrival::kPartial:
      note_stream_of(param_index);
      if (arrivals_.learning() && options_.mode != GraphMode::kStatic) {
        order_.record(param_index);
      }
      cast_to_local_dtype(param_index);
      keep_arrived(param_index);
      links_.push(param_index);
      break;
    case Arrival::kRepeated:
      report_later(
          errors::param_arrived_again(
              where(),
              names_[param_index],
              options_.mode == GraphMode::kStatic,
              options_.gradient_as_bucket_view));
      break;
    case Arrival::kUnforeseen:
      report_later(errors::param_unforeseen(where(), names_[param_index]));
      break;
    case Arrival::kFrozen:
      break;
  }
}

// More is to be added to this gradient before it is averaged.
void Reducer::cast_to_local_dtype(std::size_t param_index) {
  const auto& param = params_[param_index];
  cast_grad(param, options_.precision.of(param.scalar_type()).local);
}

// Nothing is written back, or not to this gradient.
void Reducer::cast_to_averaged_dtype(std::size_t param_index) {
  const auto& param = params_[param_index];
  cast_grad(param, options_.precision.of(param.scalar_type()).averaged);
}

// It is packed later. Until then a hook of another param may replace or clear `param.grad`.
void Reducer::keep_arrived(std::size_t param_index) {
  if (communicates()) {
    arrived_grads_[param_index] = params_[param_index].grad();
  }
}

// The gradient that was kept, if any.
std::optional<at::Tensor> Reducer::take_arrived(std::size_t param_index) {
  if (arrived_grads_.empty()) {
    return std::nullopt;
  }
  auto kept = arrived_grads_.extract(param_index);
  return kept ? std::make_optional(std::move(kept.mapped())) : std::nullopt;
}

void Reducer::note_stream_of(std::size_t param_index) {
  if (communicates()) {
    buckets_[plan_.location(param_index).bucket_index].note_stream();
  }
}

void Reducer::begin_step() {
  notes_.check();
  check_capture();
  check_params();
  begin_joined_step();
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) through ReducerDDP: the gradients are averaged over ranks, "
        "but the graph of the gradients is local. Second-order gradients will not be averaged. "
        "Average second-order gradients with ReducerDDP.synchronized_grads().");
  }
  collect_recordings();
  links_.pull_all();
  go_to(Phase::kCollecting);
  note(EventKind::kStepBegin);
  clock_.begin_step();
  clock_.note(Moment::kBackwardStart);
  notes_.begin_step(step_number());
  notes_.note(Doing::kBackward);
  apply_settings();
  launches_.reset(buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].begin_step(gated(b));
  }
  order_.restart();
  to_report_.reset();
  if (finite_check_) {
    finite_check_->begin_step();
  }
  std::fill(left_alone_.begin(), left_alone_.end(), false);

  // Nobody waits for frozen params; their gradients count as they are.
  Indices frozen;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!leaves_[i].requires_grad()) {
      frozen.push_back(i);
      left_alone_[i] = true;
      cast_to_averaged_dtype(i);
      if (options_.mode == GraphMode::kStatic && agrees_on_use()) {
        used_.mark(i);  // ranks agree once, for good: it may be thawed
      }
    }
  }
  search_unused();
  arrivals_.begin(
      frozen, options_.mode == GraphMode::kFindUnused ? unused_search_.unused() : Indices());
  for (const auto param_index : frozen) {
    accept(param_index);
  }
  for (const auto param_index : arrivals_.unused()) {
    accept(param_index);
  }
  for (const auto param_index : arrivals_.known_unused()) {
    if (!left_alone_[param_index]) {
      accept(param_index);
    }
  }
}

// Ranks without inputs make the step that this rank's forward has announced.
void Reducer::begin_joined_step() {
  if (joined_step_ == JoinedStep::kLocal) {
    throw errors::joined_step_averages(where());
  }
  if (joined_step_ == JoinedStep::kAverages) {
    joined_step_ = JoinedStep::kUnannounced;
  }
}

void Reducer::mark_used(std::size_t param_index) {
  if (agrees_on_use() && params_[param_index].grad().defined()) {
    used_.mark(param_index);
  }
}

int Reducer::divisor() const {
  return comm_hook_ ? 1 : step_divisor_.value_or(collective_->world_size());
}

void Reducer::accept(std::size_t param_index) {
  if (!communicates()) {
    cast_to_averaged_dtype(param_index);
    if (finite_check_ && !left_alone_[param_index]) {
      finite_check_->look({param_index}, {params_[param_index].grad()});
    }
    return;
  }
  const auto bucket_index = plan_.location(param_index).bucket_index;
  if (!skipped(bucket_index)) {
    pack_into_slot(param_index);
  } else if (arrivals_.arrived(param_index) && arrived_grads_.count(param_index) == 0) {
    keep_arrived(param_index);  // the bucket may have been skipped by mistake
  }
  fill(bucket_index);
  if (options_.gate == param_index) {
    open_gate();
  }
}

void Reducer::pack_into_slot(std::size_t param_index) {
  const auto location = plan_.location(param_index);
  auto& bucket = buckets_[location.bucket_index];
  const auto& slot = bucket.slots()[location.slot_index];
  const auto& param = params_[param_index];
  const auto arrived = take_arrived(param_index);
  const auto& grad = arrived ? *arrived : param.grad();
  if (const auto misfit = find_misfit(bucket, slot, grad)) {
    // Zeros from this rank, so that peers do not wait; this rank hears of it at the end.
    left_alone_[param_index] = true;
    if (leaves_[param_index].requires_grad()) {
      report_later(
          errors::gradient_mismatch(
              where(), names_[param_index], misfit->gradient, misfit->expected));
    }
    pack_nothing(bucket, slot, param);
  } else if (left_alone_[param_index]) {
    // Frozen: it counts, and stays as it is. A batched bucket is divided as a whole.
    pack_apart(bucket, slot, param, packs_when_full(bucket) ? 1 : divisor());
  } else if (packs_when_full(bucket)) {
    bucket.hold(location.slot_index, grad);
  } else {
    pack(bucket, slot, param, grad, divisor(), as_views(bucket));
  }
}

void Reducer::open_gate() {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (gated(b)) {
      fill(b);
    }
  }
}

// Of the delayed ones, a bucket that holds the gate waits for it anyway.
bool Reducer::gated(std::size_t bucket_index) const {
  return options_.gate && metas_[plan_.buckets()[bucket_index].param_indices.front()].delayed &&
         plan_.location(*options_.gate).bucket_index != bucket_index;
}

void Reducer::fill(std::size_t bucket_index) {
  auto& bucket = buckets_[bucket_index];
  if (!bucket.fill_one()) {
    return;
  }
  note(EventKind::kBucketReady, bucket_index);
  if (packs_when_full(bucket) && !skipped(bucket_index)) {
    pack_held(bucket);
  }
  if (finite_check_ && !skipped(bucket_index)) {
    look_at(bucket);
  }
  launches_.mark_ready(bucket_index);
  launch_ready();
}

void Reducer::pack_held(Bucket& bucket) {
  pack_together(bucket, params_, left_alone_, as_views(bucket));
  bucket.divide(divisor());
  bucket.note_stream();  // another stream may launch it
}

// Looks for gradients that are not finite among those that were packed.
void Reducer::look_at(Bucket& bucket) {
  bucket.join_streams();
  Indices param_indices;
  std::vector<at::Tensor> grads;
  for (const auto& slot : bucket.slots()) {
    if (!left_alone_[slot.param_index]) {
      param_indices.push_back(slot.param_index);
      grads.push_back(bucket.packed_slot(slot));
    }
  }
  finite_check_->look(param_indices, grads);
  bucket.note_stream();
}

// One thread launches at a time, without the mutex; it launches what others make ready meanwhile.
void Reducer::launch_ready() {
  if (launching_) {
    return;
  }
  launching_ = true;
  const auto stop = c10::make_scope_exit([this] {
    launching_ = false;
    changed_.notify_all();
  });
  while (const auto bucket_index = launches_.pop()) {
    if (!skipped(*bucket_index)) {
      launch(buckets_[*bucket_index], *bucket_index);
    }
  }
}

void Reducer::launch(Bucket& bucket, std::size_t bucket_index) {
  clock_.note_launch();
  note(EventKind::kLaunched, bucket_index);
  notes_.note_launch(bucket.num_bytes(), static_cast<int>(bucket.dtypes().summed));
  if (comm_hook_) {
    notes_.note(Doing::kHook, bucket_index);
  }
  communicate(
      [&] {
        if (comm_hook_) {
          bucket.launch(*comm_hook_, bucket_index, buckets_.size(), params_);
        } else {
          bucket.launch(*collective_);
        }
      },
      [&] { return describe_bucket(bucket_index); });
  if (comm_hook_) {
    notes_.note(Doing::kBackward);
  }
  for (const auto& recording : recordings_) {
    recording->follow(bucket.flight(), step_number(), bucket_index);
  }
}

// ---- the end of backward -----------------------------------------------------------------------

void Reducer::on_outer_task() {
  const auto lock = enter();
  if (phase_ == Phase::kCollecting) {
    scope_.join(weak_from_this());
  }
}

void Reducer::on_graph_task_end(int task_id) {
  std::function<void()> after_sync;
  {
    const auto lock = enter();
    scope_.leave(task_id);
    if (!scope_.empty()) {
      return;
    }
    const bool output_reached = backward_sync_.output_reached();
    backward_sync_.end(
        sync_enabled_ && (phase_ == Phase::kCollecting || BackwardScope::runs_whole_graph()));
    if (phase_ == Phase::kIdle && output_reached && sync_enabled_ &&
        BackwardScope::runs_whole_graph() && !all_frozen()) {
      begin_empty_step();
    }
    if (phase_ != Phase::kCollecting) {
      if (!output_reached) {
        note(EventKind::kLocalBackwardEnd);
      }
      return;
    }
    if (BackwardScope::inside_outer_task() && !arrivals_.unfinished().empty()) {
      // The wrapper was bypassed, so the outer task was not joined; it may bring the rest.
      if (BackwardScope::announce_outer_task(weak_from_this()) ||
          (!output_reached && !arrivals_.missing().empty())) {
        return;
      }
    }
    const Occupation occupation(*this);
    finish_step(output_reached);
    after_sync = after_sync_;
  }
  if (after_sync) {
    after_sync();
  }
}

// This rank's loss reaches no param, but peers may wait for this rank.
void Reducer::begin_empty_step() {
  try {
    begin_step();
  } catch (...) {
    if (phase_ == Phase::kCollecting) {
      fail();
    }
    throw;
  }
}

void Reducer::finish_step(bool output_reached) {
  clock_.note(Moment::kBackwardEnd);
  note(EventKind::kBackwardEnd);
  const bool learning = arrivals_.learning();
  auto missing = learning && options_.mode != GraphMode::kDefault ? Indices() : arrivals_.missing();
  // Delayed params may be unused, as in DDP.
  const auto is_delayed = [this](std::size_t i) { return metas_[i].delayed; };
  missing.erase(std::remove_if(missing.begin(), missing.end(), is_delayed), missing.end());
  const auto draining = errors::Where{collective_->rank(), clock_.num_steps(), Phase::kDraining};
  go_to(Phase::kDraining);
  try {
    // What is not final yet counts as it is, so that peers get their means and nobody waits.
    for (const auto param_index : arrivals_.unfinished()) {
      links_.pull(param_index);
      accept(param_index);
    }
    if (!learning || options_.mode != GraphMode::kStatic) {
      order_.complete();
    }
    agree_on_use();
    drain_all();
    const bool agrees = communicates() && (agrees_on_use() || finite_check_);
    if (agrees) {
      note(EventKind::kAgreeBegin);
      notes_.note(Doing::kAgreeing);
    }
    reduce_skipped_by_mistake();
    learn_use();
    report_not_finite();
    if (agrees) {
      note(EventKind::kAgreeEnd);
    }
    {
      const Unlocked unlocked(mutex_);
      notes_.check_calls();
    }
    clock_.note(Moment::kCommEnd);
    links_.push_all();
  } catch (...) {
    fail();
    throw;
  }
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    seen_[i] = seen_[i] || arrivals_.arrived(i);
  }
  static_use_agreed_ = true;
  arrivals_.end();
  arrived_grads_.clear();
  go_to(Phase::kIdle);
  note(EventKind::kStepEnd);
  clock_.end_step();
  note_outside();
  // Thrown when the reducer can be used again.
  report_end(draining, missing, output_reached);
}

void Reducer::drain(std::size_t bucket_index) {
  auto& bucket = buckets_[bucket_index];
  note(EventKind::kWaitBegin, bucket_index);
  notes_.note(Doing::kWaiting, bucket_index);
  communicate([&] { bucket.wait(*collective_); }, [&] { return describe_bucket(bucket_index); });
  std::vector<const Slot*> wanted;
  wanted.reserve(bucket.slots().size());
  for (const auto& slot : bucket.slots()) {
    if (left_alone_[slot.param_index]) {
      continue;
    }
    const bool untouched = keeps_unused_grads() && !used_.marked(slot.param_index) &&
                           num_ranks_using()[slot.param_index] == 0;
    if (!untouched) {
      wanted.push_back(&slot);
    }
  }
  if (!comm_hook_ && !bucket.sparse() && bucket.device().is_cpu()) {
    notes_.note_result(
        bucket.reduced().const_data_ptr(), static_cast<std::size_t>(bucket.num_bytes()));
  }
  note(EventKind::kWaitEnd, bucket_index);  // behind the first look at what ranks agreed on
  write_back(bucket, wanted, params_, as_views(bucket));
  bucket.release_reduced();
  note(EventKind::kWrittenBack, bucket_index);
}

}  // namespace ddpx
