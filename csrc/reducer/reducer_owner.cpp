// The methods of Reducer for several reducers of the same params: one of them averages.
//
// The reducers keep their hooks. A reducer that has yielded ignores gradients, so that its
// settings, its buckets and its recordings stay. No thread waits for the mutex of a reducer while
// it holds the mutex of another.
#include <unordered_set>

#include "../autograd/running_task.h"
#include "reducer.h"

namespace ddpx {
namespace {

// The params of `params` that are not in `others`.
std::vector<std::size_t> missing_from(const Params& others, const Params& params) {
  std::unordered_set<const at::TensorImpl*> known;
  for (const auto& leaf : others.leaves()) {
    known.insert(leaf.unsafeGetTensorImpl());
  }
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (known.count(params.leaves()[i].unsafeGetTensorImpl()) == 0) {
      missing.push_back(i);
    }
  }
  return missing;
}

}  // namespace

void Reducer::check_can_yield() {
  const auto lock = lock_after_abort();
  settle_to_yield();
}

void Reducer::yield_to(Reducer& owner) {
  const auto lock = lock_after_abort();
  settle_to_yield();
  context_.history.forward.end_forward();  // the owner gets these gradients
  owner_ = owner.weak_from_this();
}

void Reducer::settle_to_yield() {
  settle("a construction or a forward of another wrapper of the same parameters");
  if (context_.progress.phase != Phase::kIdle || in_backward()) {
    throw context_.error(
        "another wrapper cannot start to average the parameters of this wrapper while a backward "
        "runs. Wrap modules, and run forwards of other wrappers of the same parameters, between "
        "steps.");
  }
}

// Ranks may collect a wrapper at different times, and would then average by different reducers.
void Reducer::check_owner() const {
  if (owner_ && owner_->expired()) {
    throw context_.error(
        "the newer wrapper of these parameters no longer exists, or ddpx.unreplicate() has ended "
        "its averages. Python may delete a wrapper at different times on different ranks, so this "
        "older wrapper averages only after its own forward. Call this wrapper instead of its "
        "module.");
  }
}

void Reducer::take_back() {
  const auto lock = lock_after_abort();
  owner_.reset();
}

// The backward that runs has reached an output of this reducer, which has yielded. The owner
// averages all params that the two have in common. If the owner has only a part of the params, this
// reducer takes the params back.
void Reducer::reclaim() {
  const auto owner = owner_->lock();
  if (!owner || !running_task::runs_whole_graph()) {
    return;
  }
  const auto only_here = missing_from(owner->context_.params, context_.params);
  if (only_here.empty()) {
    return;
  }
  if (missing_from(context_.params, owner->context_.params).empty()) {
    const auto lock = owner->context_.mutex.try_lock();
    const auto& phase = owner->context_.progress.phase;
    if (lock && (phase == Phase::kIdle || phase == Phase::kFailed) &&
        !owner->context_.mutex.occupied_by_other()) {
      owner->owner_ = weak_from_this();
      owner_.reset();
      return;
    }
  }
  throw context_.error(
      "since this forward, another wrapper has begun to average some of the parameters of this "
      "wrapper, by its construction or a forward. " +
      errors::by_number(only_here.size(), "The gradient of ", "The gradients of ") +
      join_names(context_.params.names_of(only_here)) +
      " would not be averaged. Run the backward of each wrapper before the forward of the other "
      "wrapper, or wrap one module that holds all parameters.");
}

}  // namespace ddpx
