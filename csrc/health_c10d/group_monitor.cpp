#include "group_monitor.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "../health/watchdog.h"
#include "aborted_groups.h"
#include "store_access.h"
#include "watched_backend.h"

namespace ddpx {
namespace {

using c10::utils::get_env;
using c10d::ProcessGroup;
using WeakGroup = c10::weak_intrusive_ptr<ProcessGroup>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WeakBackend = c10::weak_intrusive_ptr<c10d::Backend>;

// The backend that makes calls in place of a group; see abort_with(). Null if there is none. The
// mutex of the registry guards it.
using Transport = WeakBackend;

// Has no weak_intrusive_ptr, which would keep the memory of the group, and so its threads, until
// the pointer is gone. The monitor has such pointers, and ends with the group.
struct Entry {
  std::weak_ptr<health::Monitor> monitor;
  std::weak_ptr<Transport> transport;
};

// A new group may have the address of an earlier group. The store and the name tell most of them
// apart. A weak pointer would keep the memory of the group, as above.
using GroupKey = std::tuple<const ProcessGroup*, const c10d::Store*, std::string>;

GroupKey key_of(const ProcessGroup& group) {
  return {&group, group.getStore().get(), group.getGroupName()};
}

struct Registry {
  std::mutex mutex;
  std::map<const ProcessGroup*, Entry> groups;
  std::set<GroupKey> unmonitored;  // groups whose monitors could not be created
};

// Never destroyed, since the watchdog's thread may outlive static objects.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

// Null if the group has no backend for CPU.
BackendPtr cpu_backend(ProcessGroup& group) {
  try {
    return group.hasBackends() ? group.getBackend(c10::kCPU) : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// The backend of the group's accelerator, otherwise of the CPU.
struct MainBackend {
  BackendPtr backend;      // null if there is none
  bool on_device = false;  // its calls run on the device: the host does not wait for them
};

MainBackend main_backend(ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  const auto main = std::min_element(devices.begin(), devices.end(), [](auto a, auto b) {
    return std::pair(a.is_cpu(), a.type()) < std::pair(b.is_cpu(), b.type());
  });
  try {
    const auto backend = main == devices.end() ? nullptr : group.getBackend(main->type());
    // gloo and shm also take tensors of a device, and their calls block the host.
    const auto name = backend ? backend->getBackendName() : "";
    return {backend, backend && !main->is_cpu() && name != "gloo" && name != "shm"};
  } catch (const std::exception&) {
    return {};
  }
}

// A function that asks a backend. It returns `unknown` once the backend is gone, or if it throws.
template <class Answer, class Question>
std::function<Answer()> asks(const BackendPtr& backend, Answer unknown, Question question) {
  return [weak = WeakBackend(backend), unknown, question] {
    const auto held = weak.lock();
    try {
      return held ? Answer(question(*held)) : unknown;
    } catch (const std::exception&) {
      return unknown;
    }
  };
}

void abort_group(const WeakGroup& weak, const Transport& transport) {
  std::unique_lock<std::mutex> lock(registry().mutex);
  const auto backend = transport.lock();
  lock.unlock();
  try {
    if (backend) {
      backend->abort();
    }
  } catch (const std::exception&) {
    // The transport was shut down already.
  }
  if (const auto group = weak.lock()) {
    abort_and_keep(group);
  }
}

health::WatchedGroup describe(
    const c10::intrusive_ptr<ProcessGroup>& group, const std::shared_ptr<Transport>& transport) {
  health::WatchedGroup described;
  described.rank = group->getRank();
  described.world_size = group->getSize();
  described.name = group->getGroupName();
  described.identity = get_env("DDPX_SHM_HOST_IDENTITY").value_or("");
  const auto lease_s = std::min(std::atof(get_env("DDPX_HOST_LEASE").value_or("").c_str()), 1e9);
  if (lease_s > 0) {
    described.lease_ns = static_cast<int64_t>(lease_s * 1e9);
  }
  described.survivors_live_on = !get_env("DDPX_GUARD_FOLDER").value_or("").empty();
  const WeakGroup weak(group);
  described.gone = [weak] { return weak.expired(); };
  const auto [backend, on_device] = main_backend(*group);
  described.on_device = on_device;
  described.abort = [weak, transport] { abort_group(weak, *transport); };
  if (on_device) {
    described.timeout_ns = asks(backend, int64_t{0}, [](c10d::Backend& asked) {
      return std::chrono::nanoseconds(asked.getBackendOptions()->timeout).count();
    });
    // The host may get this error only at its next call.
    described.has_error = asks(backend, false, [](c10d::Backend& asked) {
      return asked.getError() != c10d::ErrorType::SUCCESS;
    });
  }
  // The calls that a backend counts, by the name of its class. The type in the group is ambiguous:
  // the classes of NCCL in torch 2.15 may have the type NCCL or CUSTOM. "nccl-lazy" has no counter.
  // A backend in Python would need the GIL in each step.
  const auto name = backend ? backend->getBackendName() : "";
  // Other backends also count calls between two ranks, so correct ranks may have different numbers.
  described.same_sequence = name == "nccl" || name == "nccl2";
  if (described.same_sequence || name == "gloo" || name == "shm") {
    described.sequence = asks(backend, uint64_t{0}, [](c10d::Backend& asked) {
      return asked.getSequenceNumberForGroup();
    });
  }
  return described;
}

}  // namespace

std::shared_ptr<health::Monitor> monitor_of(const c10::intrusive_ptr<ProcessGroup>& group) {
  if (group->getSize() < 2 || !group->getStore() || get_env("DDPX_HEALTH") == "0") {
    return nullptr;
  }
  auto& groups = registry().groups;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::erase_if(groups, [](const auto& entry) { return entry.second.monitor.expired(); });
  if (const auto found = groups.find(group.get()); found != groups.end()) {
    if (auto monitor = found->second.monitor.lock()) {
      return monitor;
    }
  }
  if (registry().unmonitored.count(key_of(*group)) > 0) {
    return nullptr;
  }
  try {
    const auto transport = std::make_shared<Transport>(BackendPtr());
    auto monitor = health::Watchdog::instance().watch(
        describe(group, transport), access_to(group->getStore()));
    groups.insert_or_assign(group.get(), Entry{monitor, transport});
    if (auto* backend = dynamic_cast<WatchedBackend*>(cpu_backend(*group).get())) {
      backend->set_monitor(monitor);
    }
    return monitor;
  } catch (const std::exception& cause) {
    registry().unmonitored.insert(key_of(*group));
    TORCH_WARN(
        "ddpx cannot monitor the health of the ranks in this process group. Only the backend will "
        "report failures of these ranks. Cause: ",
        cause.what());
    return nullptr;
  }
}

void abort_with(const c10::intrusive_ptr<ProcessGroup>& group, const BackendPtr& backend) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().groups.find(group.get());
  if (const auto transport =
          found == registry().groups.end() ? nullptr : found->second.transport.lock()) {
    *transport = WeakBackend(backend);
  }
}

}  // namespace ddpx
