// The store of a process group, for the failure detector.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../health/hosts/store.h"

namespace ddpx {

// Does not keep `store` alive, since the store may contain its server.
health::StoreAccess access_to(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace ddpx
