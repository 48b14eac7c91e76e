#include "aborted_groups.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace ddpx {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kMostTime = std::chrono::seconds(20);
constexpr auto kInterval = milliseconds(100);
constexpr int kNumIdle = 3;  // intervals

std::atomic<bool> any_kept{false};

bool is_nccl(c10d::ProcessGroup& group) {
  for (const auto device : group.getDeviceTypes()) {
    try {
      if (group.getBackend(device.type())->getBackendName().starts_with("nccl")) {
        return true;
      }
    } catch (const std::exception&) {
      // The group has no backend for this device yet.
    }
  }
  return false;
}

// Before an abort.
void keep_if_nccl(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!is_nccl(*group)) {
    return;
  }
  static auto* kept = new std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(group);
  any_kept = true;
}

// The processor time of the NCCL threads of torch, and of threads that they started, in ticks.
uint64_t ticks_of_watchdogs() {
  uint64_t ticks = 0;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(task.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    const auto end = stat.rfind(')');
    if (end == std::string::npos || stat.find("(pt_nccl") == std::string::npos) {
      continue;
    }
    std::istringstream fields(stat.substr(end + 1));
    std::string field;
    for (int number = 3; number <= 15 && fields >> field; ++number) {
      ticks += number >= 14 ? std::strtoull(field.c_str(), nullptr, 10) : 0;  // utime and stime
    }
  }
  return ticks;
}

// exit() calls functions in reverse order of registration. This one runs before the destructors of
// torch and CUDA, which torch's threads still need.
[[maybe_unused]] const int registered = on_exit(
    [](int status, void*) {
      if (any_kept) {
        std::fflush(nullptr);
        _exit(status);
      }
    },
    nullptr);

}  // namespace

void abort_and_keep(const c10::intrusive_ptr<c10d::ProcessGroup>& group) noexcept {
  try {
    keep_if_nccl(group);
    group->abort();
  } catch (const std::exception&) {
    // The backend cannot abort, or is aborted already. Its calls end by their timeouts.
  }
}

void await_watchdogs_of_aborted() {
  const auto deadline = steady_clock::now() + kMostTime;
  int num_idle = 0;
  auto before = ticks_of_watchdogs();
  while (any_kept && num_idle < kNumIdle && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kInterval);
    const auto now = ticks_of_watchdogs();
    num_idle = now - before > 1 ? 0 : num_idle + 1;  // they wake up ten times a second
    before = now;
  }
}

}  // namespace ddpx
