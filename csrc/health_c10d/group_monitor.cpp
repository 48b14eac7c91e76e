#include "group_monitor.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "store_access.h"

namespace ddpx {
namespace {

using Group = c10d::ProcessGroup;
using WeakGroup = c10::weak_intrusive_ptr<Group>;
using Transport = c10::intrusive_ptr<c10d::Backend>;
using WeakTransport = c10::weak_intrusive_ptr<c10d::Backend>;

struct Registry {
  std::mutex mutex;
  std::map<const Group*, std::pair<WeakGroup, std::weak_ptr<health::Monitor>>> monitors;
  std::map<const Group*, WeakTransport> transports;
};

// Never destroyed, since the watchdog's thread may outlive static objects.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

Transport transport_of(const Group* group) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().transports.find(group);
  return found == registry().transports.end() ? nullptr : found->second.lock();
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Returns null for a backend that does not count its calls.
c10::intrusive_ptr<c10d::Backend> counting_backend(Group& group) {
  const auto type = group.getBackendType();
  try {
    if (type == Group::GLOO || type == Group::NCCL) {
      return group.getDefaultBackend();
    }
    auto backend = group.getBackend(c10::kCPU);
    return backend && backend->getBackendName() == "shm" ? backend : nullptr;
  } catch (const std::exception&) {
    return nullptr;  // the group has no backend for CPU
  }
}

health::Monitor::Group describe(const c10::intrusive_ptr<Group>& group) {
  health::Monitor::Group described;
  described.rank = group->getRank();
  described.world_size = group->getSize();
  described.identity = variable("DDPX_SHM_HOST_IDENTITY");
  const auto lease_s = std::min(std::atof(variable("DDPX_HOST_LEASE").c_str()), 1e9);
  if (lease_s > 0) {
    described.lease_ns = static_cast<int64_t>(lease_s * 1e9);
  }
  described.survivors_live_on = !variable("DDPX_GUARD_FOLDER").empty();
  const WeakGroup weak(group);
  described.gone = [weak] { return weak.expired(); };
  described.abort = [weak] {
    // On a thread of its own: NCCL may take long, and the watchdog has more to do.
    std::thread([weak] {
      const auto held = weak.lock();
      try {
        if (const auto transport = transport_of(held.get())) {
          transport->abort();
        }
        if (held) {
          held->abort();
        }
      } catch (const std::exception&) {
        // A backend without it, or one that is aborted already: its calls end by their timeouts.
      }
    }).detach();
  };
  described.sequence = [weak] {
    const auto held = weak.lock();
    const auto backend = held ? counting_backend(*held) : nullptr;
    return backend ? backend->getSequenceNumberForGroup() : 0;
  };
  // Others count calls between two ranks, too, so that their numbers differ where nothing is wrong.
  described.same_sequence = group->getBackendType() == Group::NCCL;
  if (!counting_backend(*group)) {
    described.sequence = [] { return uint64_t{0}; };
  }
  return described;
}

}  // namespace

void abort_with(const c10::intrusive_ptr<Group>& group, const Transport& transport) {
  auto& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::erase_if(known.transports, [](const auto& entry) { return entry.second.expired(); });
  known.transports.insert_or_assign(group.get(), WeakTransport(transport));
}

std::shared_ptr<health::Monitor> monitor_of(const c10::intrusive_ptr<Group>& group) {
  if (group->getSize() < 2 || !group->getStore() || variable("DDPX_HEALTH") == "0") {
    return nullptr;
  }
  auto& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::erase_if(known.monitors, [](const auto& entry) { return entry.second.first.expired(); });
  if (const auto found = known.monitors.find(group.get()); found != known.monitors.end()) {
    if (auto monitor = found->second.second.lock()) {
      return monitor;
    }
  }
  try {
    auto monitor = health::Monitor::create(describe(group), access_to(group->getStore()));
    known.monitors.insert_or_assign(group.get(), std::pair(WeakGroup(group), monitor));
    return monitor;
  } catch (const std::exception& cause) {
    TORCH_WARN(
        "ddpx cannot monitor the health of the ranks in this process group. Only the backend will "
        "report failures of these ranks. Cause: ",
        cause.what());
    return nullptr;
  }
}

std::shared_ptr<health::Monitor> monitor_of(const c10d::Backend& backend) {
  std::vector<c10::intrusive_ptr<Group>> held;  // released without the lock
  auto& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const auto& [address, entry] : known.monitors) {
    const auto group = entry.first.lock();
    if (!group || !group->hasBackends()) {
      continue;
    }
    held.push_back(group);
    const auto types = group->getDeviceTypes();
    const bool has_cpu = std::find(types.begin(), types.end(), c10::kCPU) != types.end();
    if (has_cpu && group->getBackend(c10::kCPU).get() == &backend) {
      return entry.second.lock();
    }
  }
  return nullptr;
}

}  // namespace ddpx
