#include "memory_limit.h"

#include <atomic>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace ddpx::shm {
namespace {

std::atomic<std::size_t> overridden_bytes{0};

constexpr auto kNoLimit = std::numeric_limits<std::size_t>::max();

// Reads a file that holds one number. Returns nullopt if the file is missing or contains "max".
std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  if (file >> number) {
    return number;
  }
  return std::nullopt;
}

void lower(MemoryLimit& limit, std::size_t num_bytes, const std::string& source) {
  if (num_bytes < limit.num_bytes) {
    limit = {num_bytes, source};
  }
}

// The value of a line "Name:  123 kB" in /proc/meminfo, in bytes.
std::optional<std::size_t> mem_info(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":", 0) == 0) {
      std::istringstream rest(line.substr(name.size() + 1));
      std::size_t kilobytes = 0;
      if (rest >> kilobytes) {
        return kilobytes * 1024;
      }
    }
  }
  return std::nullopt;
}

// Lowers `limit` to the memory that a control group has left. The kernel can drop the group's page
// cache, so the cache does not count as used.
void lower_to_group(
    MemoryLimit& limit,
    const std::string& directory,
    const char* max_file,
    const char* used_file,
    const char* cache_key) {
  const auto max_bytes = read_number(directory + max_file);
  const auto used = read_number(directory + used_file);
  if (!max_bytes || !used) {
    return;
  }
  std::size_t cache = 0;
  std::ifstream statistics(directory + "/memory.stat");
  for (std::string key, value; statistics >> key >> value;) {
    if (key == cache_key) {
      cache = std::stoull(value);
    }
  }
  const auto in_use = *used > cache ? *used - cache : 0;
  lower(
      limit, *max_bytes > in_use ? *max_bytes - in_use : 0, "limit of control group " + directory);
}

// Considers all control groups of the process, from its own group up to the root.
void lower_to_groups(MemoryLimit& limit) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const auto controllers = line.substr(first + 1, second - first - 1);
    auto path = line.substr(second + 1);
    while (true) {
      if (controllers.empty()) {
        lower_to_group(
            limit, "/sys/fs/cgroup" + path, "/memory.max", "/memory.current", "inactive_file");
      } else if (controllers == "memory") {
        lower_to_group(
            limit,
            "/sys/fs/cgroup/memory" + path,
            "/memory.limit_in_bytes",
            "/memory.usage_in_bytes",
            "total_inactive_file");
      }
      const auto slash = path.rfind('/');
      if (slash == std::string::npos) {
        break;
      }
      path.resize(slash);
    }
  }
}

}  // namespace

MemoryLimit available_memory() {
  if (const auto num_bytes = overridden_bytes.load()) {
    return {num_bytes, "set by a test"};
  }
  MemoryLimit limit{kNoLimit, "no known limit"};
  if (const auto available = mem_info("MemAvailable")) {
    lower(limit, *available, "MemAvailable of /proc/meminfo");
  }
  lower_to_groups(limit);
  return limit;
}

void override_available_memory(std::size_t num_bytes) {
  overridden_bytes.store(num_bytes);
}

}  // namespace ddpx::shm
