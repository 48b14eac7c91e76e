// What may be changed of a reducer between steps, and what may be looked at.
#include <algorithm>
#include <sstream>
#include <utility>

#include "../buckets/sparse_rows.h"
#include "reducer.h"

namespace ddpx {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.scalar_type() << " with " << tensor.dim()
      << (tensor.dim() == 1 ? " dimension" : " dimensions") << " on " << tensor.device();
  return out.str();
}

}  // namespace

// ---- settings ----------------------------------------------------------------------------------

void Reducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const auto lock = enter();
  if (comm_hook_) {
    raise(errors::second_comm_hook(where()));
  }
  if (phase_ != Phase::kIdle) {
    throw errors::inside_backward(where(), "register_comm_hook()");
  }
  if (!communicates()) {
    install(plan_, build_buckets(plan_, *collective_));
  }
  comm_hook_ = std::move(hook);
}

void Reducer::set_mixed_precision(Precision precision, std::shared_ptr<CommHook> hook) {
  const auto lock = enter();
  set_comm_hook(std::move(hook));
  options_.precision = precision;
  install(plan_, build_buckets(plan_));
}

void Reducer::set_divisor(std::optional<int> divisor) {
  if (divisor && *divisor < 1) {
    throw errors::not_positive("the divisor of gradients", *divisor);
  }
  const Lock lock(mutex_);
  divisor_ = divisor;
}

void Reducer::announce_joined_step(bool averages) {
  const auto lock = enter();
  if (averages || joined_step_ != JoinedStep::kAverages) {
    joined_step_ = averages ? JoinedStep::kAverages : JoinedStep::kLocal;
  }
}

void Reducer::set_sparse_rows(std::size_t param_index, const at::Tensor& rows) {
  const Lock lock(mutex_);
  if (param_index >= params_.size()) {
    throw errors::no_such_param(param_index, params_.size());
  }
  if (!metas_[param_index].expect_sparse) {
    throw InternalError("rows for " + names_[param_index] + ", which is not sparse");
  }
  if (rows.scalar_type() != at::kLong || rows.layout() != at::kStrided || rows.dim() != 1 ||
      rows.device() != metas_[param_index].device) {
    throw errors::bad_sparse_rows(names_[param_index], describe(rows));
  }
  // Torch does not check the indices of a sparse tensor, and writes wherever they point.
  const auto& param = params_[param_index];
  if (const auto row = stray_row(rows, param.dim() == 0 ? 0 : param.size(0))) {
    throw errors::no_such_row(names_[param_index], *row);
  }
  sparse_rows_[param_index] = rows;
}

void Reducer::apply_settings() {
  step_divisor_ = divisor_;
  for (const auto& [param_index, rows] : sparse_rows_) {
    if (!buckets_.empty()) {
      buckets_[plan_.location(param_index).bucket_index].set_rows(rows);
    }
  }
}

void Reducer::set_check_finite(bool enabled) {
  const auto lock = enter_between_steps();
  if (phase_ != Phase::kIdle) {
    throw errors::inside_backward(where(), "set_check_finite()");
  }
  finite_check_ = enabled ? std::make_optional<FiniteCheck>() : std::nullopt;
}

void Reducer::add_recording(std::shared_ptr<Recording> recording) {
  const auto lock = enter_between_steps();
  if (phase_ != Phase::kIdle) {
    throw errors::inside_backward(where(), "ddpx.record()");
  }
  recording->note_plan(step_number(), plan_);
  recordings_.push_back(std::move(recording));
}

void Reducer::remove_recording(const std::shared_ptr<Recording>& recording) {
  const Lock lock(mutex_);
  recordings_.erase(
      std::remove(recordings_.begin(), recordings_.end(), recording), recordings_.end());
}

void Reducer::number_as_constructed() {
  const auto lock = enter();
  notes_.number_as_constructed();
  note_outside();
}

void Reducer::continue_from(Reducer& older) {
  int64_t num_steps = 0;
  std::vector<std::shared_ptr<Recording>> recordings;
  health::StepNotes notes;
  {
    const auto lock = older.enter();
    notes = older.notes_;
    num_steps = older.clock_.num_steps();
    recordings.swap(older.recordings_);
  }
  const auto lock = enter();
  clock_.count_from(num_steps);
  notes_.continue_from(notes);
  for (auto& recording : recordings) {
    add_recording(std::move(recording));
  }
}

void Reducer::set_after_sync(std::function<void()> after_sync) {
  const Lock lock(mutex_);
  after_sync_.swap(after_sync);  // the old one goes without the lock
}

void Reducer::set_static_graph() {
  const auto lock = enter();
  if (options_.mode == GraphMode::kStatic) {
    return;
  }
  if (phase_ != Phase::kIdle || !arrivals_.learning()) {
    raise(errors::static_graph_too_late(where()));
  }
  auto plan = initial_plan(GraphMode::kStatic);
  auto buckets = build_buckets(plan);
  options_.mode = GraphMode::kStatic;
  arrivals_ = ArrivalTracker(params_.size(), options_.mode);
  order_ = ArrivalOrder(params_.size(), /*wanted=*/true);
  forget_use();  // of steps that broke off
  static_use_agreed_ = false;
  install(std::move(plan), std::move(buckets));
}

void Reducer::set_collective(
    std::shared_ptr<Collective> collective, std::optional<int64_t> num_steps) {
  const auto lock = enter();
  if (phase_ == Phase::kCollecting || phase_ == Phase::kDraining) {
    throw errors::inside_backward(where(), "_update_process_group()");
  }
  auto plan = initial_plan(options_.mode);
  auto buckets =
      comm_hook_ || !collective->alone() ? build_buckets(plan, *collective) : std::vector<Bucket>();
  collective_ = std::move(collective);
  if (num_steps) {
    clock_.catch_up(*num_steps);
  }
  agreed_order_.clear();
  order_ = ArrivalOrder(params_.size(), options_.mode != GraphMode::kFindUnused);
  arrivals_ = ArrivalTracker(params_.size(), options_.mode);
  forget_use();
  static_use_agreed_ = false;
  install(std::move(plan), std::move(buckets));
  join_group();
}

void Reducer::prepare_for_backward() {
  const auto lock = enter();
  if (BackwardScope::inside_any_task()) {
    throw errors::inside_backward(where(), "prepare_for_backward()");
  }
  if (joined_step_ == JoinedStep::kLocal || joined_step_ == JoinedStep::kUnannounced) {
    throw errors::prepared_in_join(where());
  }
  backward_sync_.prepare();
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    GradHook::announce(leaves_[i], i, weak_from_this());
  }
}

void Reducer::remove_hooks() {
  const auto lock = enter();
  if (phase_ != Phase::kIdle || BackwardScope::inside_any_task()) {
    throw errors::hooks_in_use(where());
  }
  hooks_.clear();
}

// ---- a look inside -----------------------------------------------------------------------------

bool Reducer::graph_was_static() const {
  const Lock lock(mutex_);
  return arrivals_.always_the_same();
}

Phase Reducer::phase() const {
  const Lock lock(mutex_);
  return phase_;
}

BucketPlan Reducer::plan() const {
  const Lock lock(mutex_);
  return plan_;
}

std::vector<std::size_t> Reducer::arrival_order() const {
  const Lock lock(mutex_);
  return agreed_order_;
}

std::vector<int32_t> Reducer::used_by_ranks() {
  const Lock lock(mutex_);
  // A thread that drains a step may wait for this one, as for the continuation of a hook's future.
  if (!occupant_ || *occupant_ == std::this_thread::get_id()) {
    const Occupation occupation(*this);
    communicate([&] { used_.settle(); }, errors::used_map_agreement);
    last_use_ = used_.settled();
  }
  return communicate(
      [sums = last_use_] { return sums.num_ranks_using(); }, errors::used_map_agreement);
}

std::string Reducer::last_error() const {
  const Lock lock(mutex_);
  return last_error_;
}

StepReport Reducer::report() const {
  const Lock lock(mutex_);
  return clock_.report();
}

int64_t Reducer::num_steps() const {
  const Lock lock(mutex_);
  return clock_.num_steps();
}

bool Reducer::recorded() const {
  const Lock lock(mutex_);
  return !recordings_.empty();
}

void Reducer::set_sample_rate(int64_t sample_rate) {
  if (sample_rate < 1) {
    throw errors::not_positive("the sample rate", sample_rate);
  }
  const Lock lock(mutex_);
  clock_.set_sample_rate(sample_rate);
}

}  // namespace ddpx
