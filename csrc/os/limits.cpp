#include "limits.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <vector>

namespace ddpx::os {
namespace {

std::atomic<std::size_t> overridden_bytes{0};

struct ControlGroup {
  std::string directory;
  bool unified;  // version 2 of control groups, which names its files differently
};

// The groups of this process under a controller ("memory", "cpu"), from its own group up to the
// root.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:path
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) {
      continue;
    }
    const auto mount = root + "/sys/fs/cgroup" + (unified ? "" : "/" + controller);
    for (auto path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      groups.push_back({mount + path, unified});
      if (path.find('/') == std::string::npos) {
        break;
      }
    }
  }
  return groups;
}

// The number after `key` in a file, or at its start. Returns nullopt if there is none, such as for
// "max".
std::optional<double> number_of(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string word;
  while (!key.empty() && file >> word && word != key) {
  }
  double number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

void lower(MemoryLimit& limit, double num_bytes, const std::string& source) {
  if (num_bytes < static_cast<double>(limit.num_bytes)) {
    limit = {static_cast<std::size_t>(std::max(num_bytes, 0.0)), source};
  }
}

// Lowers `limit` to the memory that a control group has left. The kernel can drop the group's page
// cache, so the cache does not count as used.
void lower_to_group(MemoryLimit& limit, const ControlGroup& group) {
  const auto in_group = [&](const char* unified, const char* other, const std::string& key = "") {
    return number_of(group.directory + (group.unified ? unified : other), key);
  };
  const auto max_bytes = in_group("/memory.max", "/memory.limit_in_bytes");
  const auto used = in_group("/memory.current", "/memory.usage_in_bytes");
  if (!max_bytes || !used || *max_bytes - *used >= static_cast<double>(limit.num_bytes)) {
    return;
  }
  // Only now, since the kernel has to add these figures up.
  const auto cache = number_of(
      group.directory + "/memory.stat", group.unified ? "inactive_file" : "total_inactive_file");
  lower(
      limit,
      *max_bytes - std::max(*used - cache.value_or(0), 0.0),
      "limit of control group " + group.directory);
}

// The CPU time that a control group grants, in cores. Returns nullopt if the group has no limit.
std::optional<double> quota_of(const ControlGroup& group) {
  double quota = 0;
  double period = 0;
  if (group.unified) {
    std::ifstream(group.directory + "/cpu.max") >> quota >> period;  // "max 100000": no limit
  } else {
    std::ifstream(group.directory + "/cpu.cfs_quota_us") >> quota;  // -1: no limit
    std::ifstream(group.directory + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

}  // namespace

MemoryLimit available_memory(const std::string& root) {
  if (const auto num_bytes = overridden_bytes.load()) {
    return {num_bytes, "set by a test"};
  }
  MemoryLimit limit{std::numeric_limits<std::size_t>::max(), "no known limit"};
  if (const auto kilobytes = number_of(root + "/proc/meminfo", "MemAvailable:")) {
    lower(limit, *kilobytes * 1024, "MemAvailable of /proc/meminfo");
  }
  for (const auto& group : control_groups("memory", root)) {
    lower_to_group(limit, group);
  }
  return limit;
}

void override_available_memory(std::size_t num_bytes) {
  overridden_bytes.store(num_bytes);
}

CpuLimits cpu_limits(const std::string& root) {
  CpuLimits limits{};
  if (sched_getaffinity(0, sizeof(limits.cores), &limits.cores) != 0) {
    std::memset(&limits.cores, 0xff, sizeof(limits.cores));
  }
  for (const auto& group : control_groups("cpu", root)) {
    const auto quota = quota_of(group);
    struct stat status{};
    if (quota && (limits.quota_group == 0 || *quota < limits.quota_cores) &&
        stat(group.directory.c_str(), &status) == 0) {
      limits.quota_group = status.st_ino;
      limits.quota_cores = *quota;
    }
  }
  return limits;
}

}  // namespace ddpx::os
