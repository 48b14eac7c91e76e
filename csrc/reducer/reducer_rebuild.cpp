// The methods of Reducer that rebuild buckets, by the order in which gradients arrive.
#include <functional>
#include <utility>

#include "reducer.h"

namespace ddpx {

bool Reducer::rebuild_buckets() {
  const auto lock = lock_after_abort();
  check_not_pending("_rebuild_buckets()");
  recover_if_failed();
  return context_.progress.phase == Phase::kIdle && rebuild_if_due();
}

bool Reducer::rebuild_if_due() {
  auto& order = context_.history.order;
  if (!order.due()) {
    return false;
  }
  rebuild([&] {
    auto agreed = context_.communicate(
        [&] { return order.agree(*context_.collective, context_.params.device()); },
        [] { return "the broadcast of the order in which gradients arrived"; });
    auto plan = context_.plan_by_arrival(agreed);
    order.retire(std::move(agreed));
    return plan;
  });
  return true;
}

void Reducer::rebuild(const std::function<BucketPlan()>& agree) {
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  context_.go_to(Phase::kRebuilding);
  emit(StepEvent::kRebuildBegin);
  try {
    // From now on peers have the new plan. If the allocation fails, recover() allocates for it. The
    // old buckets are dropped first, so that no step needs the memory of both.
    context_.buckets.install(agree(), {});
    context_.replace_buckets(context_.buckets.plan());
  } catch (...) {
    fail();
    throw;
  }
  context_.go_to(Phase::kIdle);
  emit(StepEvent::kRebuildEnd);
}

}  // namespace ddpx
