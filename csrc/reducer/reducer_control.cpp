// What happens to a reducer between steps.
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../buckets/slot_io.h"
#include "../comm/different_calls.h"
#include "reducer.h"

namespace ddpx {
namespace {

ParamMeta meta_of(const ReducerParam& param) {
  const auto& tensor = param.tensor;
  return ParamMeta{
      tensor.numel(),
      static_cast<int64_t>(tensor.element_size()),
      tensor.scalar_type(),
      tensor.device(),
      param.expect_sparse,
      param.delayed};
}

std::vector<ParamMeta> metas_of(const std::vector<ReducerParam>& params) {
  std::vector<ParamMeta> metas;
  metas.reserve(params.size());
  for (const auto& param : params) {
    metas.push_back(meta_of(param));
  }
  return metas;
}

const at::Tensor& leaf_of(const ReducerParam& param) {
  return param.leaf.defined() ? param.leaf : param.tensor;
}

// The number of elements of a DTensor is not that of its shard.
bool fits(const at::Tensor& leaf, const at::Tensor& param, const ParamMeta& meta) {
  return (!leaf.is_same(param) || leaf.numel() == meta.numel) && leaf.scalar_type() == meta.dtype &&
         leaf.device() == meta.device;
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective,
    std::vector<ReducerParam> bystanders) {
  if (params.empty()) {
    throw UserError(
        "the reducer got no parameters. Pass at least one parameter that requires a gradient.");
  }
  for (const auto& param : params) {
    const auto& leaf = leaf_of(param);
    if (!leaf.requires_grad() || !leaf.is_leaf()) {
      throw errors::not_a_trainable_leaf(param.name);
    }
  }
  if (options.gate && *options.gate >= params.size()) {
    throw errors::no_such_param(*options.gate, params.size());
  }
  std::shared_ptr<Reducer> reducer(
      new Reducer(params, std::move(options), std::move(collective), std::move(bystanders)));
  for (std::size_t i = 0; i < params.size(); ++i) {
    reducer->hooks_.emplace_back(leaf_of(params[i]), i, reducer);
  }
  reducer->join_group();
  return reducer;
}

Reducer::Reducer(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective,
    std::vector<ReducerParam> bystanders)
    : options_(std::move(options)),
      collective_(std::move(collective)),
      metas_(metas_of(params)),
      bystanders_(std::move(bystanders)),
      plan_(initial_plan(options_.mode)),
      arrivals_(params.size(), options_.mode),
      order_(params.size(), options_.mode != GraphMode::kFindUnused),
      used_(params.size(), params.front().tensor.device()),
      unused_search_(params.size()),
      left_alone_(params.size(), false),
      seen_(params.size(), false) {
  for (const auto& param : params) {
    params_.push_back(param.tensor);
    leaves_.push_back(leaf_of(param));
    names_.push_back(param.name);
    if (param.link) {
      links_.add(params_.size() - 1, param.link);
    }
  }
  hooks_.reserve(params.size());
  install(plan_, build_buckets(plan_));
}

// Lets the ranks of the group know of this wrapper.
void Reducer::join_group() {
  notes_ = health::StepNotes(collective_->monitor(), weak_from_this());
  name_buckets();
  note_outside();
}

Reducer::~Reducer() {
  if (phase_ != Phase::kIdle || BackwardScope::inside_any_task()) {
    for (auto& hook : hooks_) {
      hook.abandon();
    }
  }
}

// ---- threads ------------------------------------------------------------------------------------

Reducer::Lock Reducer::enter() const {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return !occupant_ || *occupant_ == std::this_thread::get_id(); });
  return lock;
}

Reducer::Lock Reducer::enter_between_steps() const {
  Lock lock(mutex_);
  changed_.wait(lock, [this] {
    return !occupant_ || *occupant_ == std::this_thread::get_id() || phase_ == Phase::kCollecting ||
           phase_ == Phase::kDraining;
  });
  return lock;
}

Reducer::Occupation::Occupation(const Reducer& reducer)
    : reducer_(reducer), outermost_(!reducer.occupant_) {
  reducer_.occupant_ = std::this_thread::get_id();
}

Reducer::Occupation::~Occupation() {
  if (outermost_) {
    reducer_.occupant_.reset();
    reducer_.changed_.notify_all();
  }
}

// ---- forward -----------------------------------------------------------------------------------

bool Reducer::prepare_forward() {
  const auto lock = enter();
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
  notes_.check();
  check_params();
  auto owed = std::exchange(owed_, {});
  owed.erase(
      std::remove_if(owed.begin(), owed.end(), [this](std::size_t i) { return seen_[i]; }),
      owed.end());
  std::fill(seen_.begin(), seen_.end(), false);
  if (!owed.empty()) {
    raise(errors::params_without_gradient(where(), names_of(owed)));
  }
  clock_.note(Moment::kForwardStart);
  collect_recordings();
  note(EventKind::kForwardBegin);
  notes_.begin_step(step_number());
  notes_.note(Doing::kForward);
  return rebuild_if_due();
}

bool Reducer::rebuild_buckets() {
  const auto lock = enter();
  if (phase_ == Phase::kFailed) {
    recover();
  }
  return phase_ == Phase::kIdle && rebuild_if_due();
}

bool Reducer::rebuild_if_due() {
  if (!order_.due()) {
    return false;
  }
  const Occupation occupation(*this);
  go_to(Phase::kRebuilding);
  notes_.note(Doing::kRebuilding);
  try {
    communicate(
        [&] { agreed_order_ = order_.agree(*collective_, params_.front().device()); },
        errors::order_broadcast);
    // From here on peers have the new plan, also if this rank has no memory for its buckets yet.
    plan_ = BucketPlan::by_arrival(metas_, options_.caps, agreed_order_);
    if (options_.gate) {
      plan_ = plan_.delayed_behind(metas_, *options_.gate);
    }
    order_.retire();
    install(plan_, build_buckets(plan_));
  } catch (...) {
    fail();
    throw;
  }
  go_to(Phase::kIdle);
  notes_.note(Doing::kForward);
  return true;
}

BucketPlan Reducer::initial_plan(GraphMode mode) const {
  auto plan = BucketPlan::initial(metas_, options_.caps, mode);
  return options_.gate ? plan.delayed_behind(metas_, *options_.gate) : plan;
}

// Changes nothing.
std::vector<Bucket> Reducer::build_buckets(const BucketPlan& plan, Collective& collective) const {
  const at::NoGradGuard no_grad;
  std::vector<Bucket> buckets;
  for (const auto& spec : plan.buckets()) {
    const bool sparse = metas_[spec.param_indices.front()].expect_sparse;
    buckets.emplace_back(spec, params_, sparse, collective, options_.precision);
  }
  return buckets;
}

void Reducer::install(BucketPlan plan, std::vector<Bucket> buckets) {
  const at::NoGradGuard no_grad;
  for (const auto& recording : recordings_) {
    recording->note_plan(step_number(), plan);
  }
  for (auto& bucket : buckets_) {
    bucket.keep_for_streams();
  }
  plan_ = std::move(plan);
  buckets_ = std::move(buckets);
  name_buckets();
  if (!options_.gradient_as_bucket_view) {
    return;
  }
  links_.pull_all();
  for (const auto& bucket : buckets_) {
    if (!bucket.can_lend()) {
      continue;
    }
    for (const auto& slot : bucket.slots()) {
      adopt(bucket, slot, params_[slot.param_index]);
    }
  }
  links_.push_all();
}

std::vector<Bucket> Reducer::build_buckets(const BucketPlan& plan) const {
  return communicates() ? build_buckets(plan, *collective_) : std::vector<Bucket>();
}

void Reducer::name_buckets() {
  if (!notes_.on()) {
    return;
  }
  std::vector<std::vector<std::string>> names;
  for (const auto& spec : plan_.buckets()) {
    names.push_back(names_of(spec.param_indices));
  }
  notes_.name_buckets(std::move(names));
}

// A param that was cast has lost its hook, one that was unfrozen never had one: their gradients
// would stay local without a word.
void Reducer::check_params() {
  Indices changed;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    if (hooks_[i].attached_to(leaves_[i])) {
      continue;
    }
    if (!fits(leaves_[i], params_[i], metas_[i])) {
      changed.push_back(i);
    } else if (leaves_[i].requires_grad()) {
      GradHook hook(leaves_[i], i, weak_from_this());  // cast to and fro
      if (BackwardScope::inside_any_task()) {
        hooks_[i].abandon();
      }
      hooks_[i] = std::move(hook);
    }
  }
  if (!changed.empty()) {
    raise(errors::params_changed(where(), names_of(changed)));
  }
  std::vector<std::string> unfrozen;
  for (const auto& bystander : bystanders_) {
    if (bystander.tensor.requires_grad()) {
      unfrozen.push_back(bystander.name);
    }
  }
  if (!unfrozen.empty()) {
    raise(errors::params_unfrozen(where(), unfrozen));
  }
}

void Reducer::check_capture() const {
  if (reads_on_host() && is_capturing(params_.front().device())) {
    refuse_capture();
  }
}

void Reducer::refuse_capture() const {
  const Lock lock(mutex_);
  if (reads_on_host()) {
    throw errors::under_capture(
        where(), finite_check_ ? "set_check_finite()" : "find_unused_parameters");
  }
}

bool Reducer::all_frozen() const {
  return std::none_of(
      leaves_.begin(), leaves_.end(), [](const auto& leaf) { return leaf.requires_grad(); });
}

void Reducer::begin_forward() {
  const auto lock = enter();
  note(EventKind::kForwardBegin);
  notes_.note(Doing::kForward);
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  const auto lock = enter();
  note(EventKind::kForwardEnd);
  const auto forward = sync_enabled_ ? ForwardSync::kOn : ForwardSync::kOff;
  outputs_.watch(outputs, forward, weak_from_this());
}

// ---- names for errors ---------------------------------------------------------------------------

std::vector<std::string> Reducer::missing_params() {
  const Lock lock(mutex_, std::try_to_lock);
  return lock && phase_ == Phase::kCollecting ? names_of(arrivals_.missing())
                                              : std::vector<std::string>();
}

std::string Reducer::describe_bucket(std::size_t bucket_index) const {
  return errors::bucket_all_reduce(
      bucket_index, names_of(plan_.buckets()[bucket_index].param_indices));
}

std::vector<std::string> Reducer::names_of(const Indices& param_indices) const {
  std::vector<std::string> names;
  names.reserve(param_indices.size());
  for (const auto param_index : param_indices) {
    names.push_back(names_[param_index]);
  }
  return names;
}

// What a backend or a user's hook threw, as an error that says `what` failed where; an
// InternalError as it is. If ranks are gone, that is said instead. To be called in a catch block.
void Reducer::explain(const errors::Where& where, const std::string& what) const {
  try {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const health::GroupFailed&) {
    notes_.explain_error({});
  } catch (const DifferentCalls& cause) {
    notes_.raise_mismatch(cause.how());
  } catch (const HookError& cause) {
    if (notes_.group_failed()) {
      notes_.explain_error(cause.what());
    }
  } catch (const c10::Error& cause) {
    notes_.explain_error(cause.what_without_backtrace());
  } catch (const std::exception& cause) {
    notes_.explain_error(cause.what());
  }
  try {
    throw;
  } catch (const c10::DistBackendError& cause) {
    // Kept, because scripts catch it.
    const auto error = errors::communication_failed(where, what, cause.what_without_backtrace());
    throw c10::DistBackendError({__func__, __FILE__, __LINE__}, error.what());
  } catch (const c10::Error& cause) {
    throw errors::communication_failed(where, what, cause.what_without_backtrace());
  } catch (const std::exception& cause) {
    throw errors::communication_failed(where, what, cause.what());
  }
}

}  // namespace ddpx
