// A reduction that was launched and has not been waited for.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "collective.h"
#include "comm_hook.h"

namespace ddpx {

// Either an all-reduce (`work`, and `future` if its value is the sum), or what a communication hook
// returned (`future`, `hook`). A bucket owns it, under the mutex of the reducer.
struct InFlightReduction {
  Collective::Work work;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  CommHook* hook = nullptr;
};

}  // namespace ddpx
