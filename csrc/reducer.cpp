#include "reducer.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "slot_io.h"

namespace ddpx {
namespace {

std::vector<ParamMeta> metas_of(const std::vector<ReducerParam>& params) {
  std::vector<ParamMeta> metas;
  metas.reserve(params.size());
  for (const auto& param : params) {
    const auto& tensor = param.tensor;
    metas.push_back(
        ParamMeta{
            tensor.numel(),
            static_cast<int64_t>(tensor.element_size()),
            tensor.scalar_type(),
            tensor.device(),
            param.expect_sparse});
  }
  return metas;
}

std::string describe_used_map() {
  return "the agreement on which parameters were used";
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective) {
  if (params.empty()) {
    throw UserError("a reducer needs at least one parameter that requires a gradient");
  }
  std::shared_ptr<Reducer> reducer(new Reducer(params, std::move(options), std::move(collective)));
  for (std::size_t i = 0; i < params.size(); ++i) {
    reducer->hooks_.emplace_back(params[i].tensor, i, reducer);
  }
  return reducer;
}

Reducer::Reducer(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective)
    : options_(std::move(options)),
      collective_(std::move(collective)),
      metas_(metas_of(params)),
      plan_(BucketPlan::initial(metas_, options_.caps, options_.mode)),
      arrivals_(params.size(), options_.mode),
      order_(params.size(), options_.mode != GraphMode::kFindUnused),
      used_(params.size(), params.front().tensor.device()) {
  for (const auto& param : params) {
    params_.push_back(param.tensor);
    names_.push_back(param.name);
  }
  hooks_.reserve(params.size());
  make_buckets();
}

Reducer::~Reducer() {
  if (phase_ != Phase::kIdle || BackwardScope::inside_any_task()) {
    for (auto& hook : hooks_) {
      hook.abandon();
    }
  }
}

// ---- forward -----------------------------------------------------------------------------------

bool Reducer::prepare_forward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::kFailed) {
    recover();
  }
  if (phase_ == Phase::kCollecting) {
    if (scope_.empty() && !BackwardScope::inside_any_task()) {
      const auto error = errors::backward_incomplete(where(), names_of(arrivals_.missing()));
      fail();
      throw error;
    }
    return false;  // a forward within a backward, as checkpointing of the wrapper makes
  }
  if (!order_.due()) {
    return false;
  }
  go_to(Phase::kRebuilding);
  try {
    std::vector<std::size_t> order;
    communicate(
        [&] { order = order_.agree(*collective_, params_.front().device()); },
        [] { return "the broadcast of the order in which gradients arrived"; });
    plan_ = BucketPlan::by_arrival(metas_, options_.caps, order);
    make_buckets();
  } catch (...) {
    fail();
    throw;
  }
  order_.retire();
  go_to(Phase::kIdle);
  return true;
}

void Reducer::make_buckets() {
  const at::NoGradGuard no_grad;
  buckets_.clear();
  for (const auto& spec : plan_.buckets()) {
    const bool sparse = metas_[spec.param_indices.front()].expect_sparse;
    buckets_.emplace_back(spec, params_, sparse, *collective_);
  }
  if (!options_.gradient_as_bucket_view) {
    return;
  }
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots()) {
      adopt(bucket, slot, params_[slot.param_index]);
    }
  }
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    watch_output(output, weak_from_this());
  }
}

// ---- backward: gradients arrive ----------------------------------------------------------------

void Reducer::on_output_grad() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (sync_enabled_) {
    scope_.join(weak_from_this());
  }
}

void Reducer::on_grad(std::size_t param_index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::kFailed) {
    recover();
  }
  if (phase_ == Phase::kIdle && !sync_enabled_) {
    mark_used(param_index);
    return;
  }
  scope_.join(weak_from_this());  // first, so that an error in what follows is reported as abort
  if (phase_ == Phase::kIdle) {
    begin_step();
  }
  mark_used(param_index);
  switch (arrivals_.arrive(param_index)) {
    case Arrival::kFinal:
      order_.record(param_index);
      accept(param_index);
      break;
    case Arrival::kPartial:
      break;
    case Arrival::kRepeated:
      throw errors::param_arrived_again(
          where(), names_[param_index], options_.mode == GraphMode::kStatic);
  }
}

void Reducer::begin_step() {
  go_to(Phase::kCollecting);
  arrivals_.begin();
  launches_.reset(buckets_.size());
  for (auto& bucket : buckets_) {
    bucket.begin_step();
  }
  order_.restart();
  for (const auto param_index : arrivals_.known_unused()) {
    accept(param_index);
  }
}

void Reducer::mark_used(std::size_t param_index) {
  if (agrees_on_use() && params_[param_index].grad().defined()) {
    used_.mark(param_index);
  }
}

void Reducer::accept(std::size_t param_index) {
  const auto location = plan_.location(param_index);
  auto& bucket = buckets_[location.bucket_index];
  const auto& slot = bucket.slots()[location.slot_index];
  const auto& param = params_[param_index];
  if (const auto misfit = find_misfit(bucket, slot, param)) {
    throw errors::gradient_mismatch(
        where(), names_[param_index], misfit->gradient, misfit->expected);
  }
  pack(bucket, slot, param, collective_->world_size(), options_.gradient_as_bucket_view);
  if (bucket.fill_one()) {
    launches_.mark_ready(location.bucket_index);
    launch_ready();
  }
}

void Reducer::launch_ready() {
  while (const auto bucket_index = launches_.pop()) {
    communicate(
        [&] { buckets_[*bucket_index].launch(*collective_); },
        [&] { return describe_bucket(*bucket_index); });
  }
}

// ---- backward: its end -------------------------------------------------------------------------

void Reducer::on_graph_task_end(int task_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  scope_.leave(task_id);
  if (phase_ != Phase::kCollecting || !scope_.empty()) {
    return;
  }
  if (BackwardScope::inside_outer_task() && !arrivals_.missing().empty()) {
    return;  // the wrapper was bypassed, so the outer task was not joined; it may bring the rest
  }
  finish_step();
}

void Reducer::finish_step() {
  const auto missing = arrivals_.missing();
  const bool learning = arrivals_.learning();
  go_to(Phase::kDraining);
  try {
    // What is not final yet counts as it is, so that peers get their means and nobody waits.
    std::vector<std::size_t> open = missing;
    if (learning) {
      open.resize(params_.size());
      std::iota(open.begin(), open.end(), 0);
    }
    for (const auto param_index : open) {
      accept(param_index);
    }
    if (!learning) {
      order_.complete();
    }
    if (agrees_on_use()) {
      communicate([&] { used_.launch(*collective_); }, describe_used_map);
    }
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      drain(b);
    }
    if (options_.mode == GraphMode::kFindUnused) {
      used_.clear();  // a static graph keeps the answer
    }
  } catch (...) {
    fail();
    throw;
  }
  arrivals_.end();
  // The error is made in the phase that it is about, and thrown when the reducer can be used again.
  const auto draining = where();
  go_to(Phase::kIdle);
  if (missing.empty() || learning || options_.mode == GraphMode::kFindUnused) {
    return;
  }
  if (options_.mode == GraphMode::kStatic) {
    throw errors::static_graph_changed(draining, names_of(missing));
  }
  throw errors::params_without_gradient(draining, names_of(missing));
}

void Reducer::drain(std::size_t bucket_index) {
  auto& bucket = buckets_[bucket_index];
  communicate([&] { bucket.wait(); }, [&] { return describe_bucket(bucket_index); });
  for (const auto& slot : bucket.slots()) {
    const bool untouched =
        keeps_unused_grads() &&
        communicate([&] { return used_.globally_unused(slot.param_index); }, describe_used_map);
    if (!untouched) {
      write_back(bucket, slot, params_[slot.param_index], options_.gradient_as_bucket_view);
    }
  }
}

// ---- failure -----------------------------------------------------------------------------------

void Reducer::on_graph_task_abort(int task_id) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  scope_.leave(task_id);
  if (phase_ != Phase::kCollecting || !scope_.empty()) {
    return;
  }
  if (launches_.num_launched() == buckets_.size()) {
    match_peers();
  }
  fail();
}

void Reducer::match_peers() noexcept {
  try {
    order_.complete();
    if (agrees_on_use()) {
      used_.launch(*collective_);
    }
  } catch (...) {
    // The error that aborted this backward is the one to report.
  }
}

void Reducer::fail() noexcept {
  try {
    go_to(Phase::kFailed);
    recover();
  } catch (...) {
    // Out of memory, say: the next step tries again, and its error reaches the user.
  }
}

void Reducer::recover() {
  // Peers may never join what is in flight, so nothing is waited for: the old buffers are left to
  // the backend, whose work objects keep them alive.
  make_buckets();
  if (agrees_on_use()) {
    used_ = UsedMap(params_.size(), params_.front().device());
  }
  order_.restart();
  go_to(Phase::kIdle);
}

// ---- the rest ----------------------------------------------------------------------------------

void Reducer::remove_hooks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ != Phase::kIdle || BackwardScope::inside_any_task()) {
    throw errors::hooks_in_use(where());
  }
  hooks_.clear();
}

Phase Reducer::phase() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return phase_;
}

BucketPlan Reducer::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plan_;
}

template <typename Call, typename Describe>
auto Reducer::communicate(const Call& call, const Describe& describe) const -> decltype(call()) {
  try {
    return call();
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& cause) {
    throw errors::communication_failed(where(), describe(), cause.what());
  }
}

std::string Reducer::describe_bucket(std::size_t bucket_index) const {
  return errors::bucket_all_reduce(
      bucket_index, names_of(plan_.buckets()[bucket_index].param_indices));
}

std::vector<std::string> Reducer::names_of(const std::vector<std::size_t>& param_indices) const {
  std::vector<std::string> names;
  names.reserve(param_indices.size());
  for (const auto param_index : param_indices) {
    names.push_back(names_[param_index]);
  }
  return names;
}

}  // namespace ddpx
