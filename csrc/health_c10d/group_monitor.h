// The monitor of each process group.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "../health/monitor.h"

namespace ddpx {

// The first call for a group creates its monitor. Null if the group has one rank or no store, or
// with DDPX_HEALTH=0. If the first call fails, it warns, and all calls for the group return null.
// Does not wait for other ranks. Thread-safe.
std::shared_ptr<health::Monitor> monitor_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// From now on, an abort of the group by its monitor also aborts `backend`, which makes calls in
// place of the group. Has no effect if the group has no monitor. Thread-safe.
void abort_with(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace ddpx
