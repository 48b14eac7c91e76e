#include "memory_limit.h"

#include <atomic>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace ddpx::shm {
namespace {

std::atomic<std::size_t> pretended{0};

constexpr auto kNoLimit = std::numeric_limits<std::size_t>::max();

// The number in a file of one number; nothing if there is no such file, or it says "max".
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

// Of a "Name:  123 kB" line.
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

// What a control group has left. Its page cache can be dropped, so it does not count as used.
void lower_to_group(
    MemoryLimit& limit,
    const std::string& directory,
    const char* most_file,
    const char* used_file,
    const char* cache_key) {
  const auto most = read_number(directory + most_file);
  const auto used = read_number(directory + used_file);
  if (!most || !used) {
    return;
  }
  std::size_t cache = 0;
  std::ifstream statistics(directory + "/memory.stat");
  for (std::string key, value; statistics >> key >> value;) {
    if (key == cache_key) {
      cache = std::stoull(value);
    }
  }
  const auto held = *used > cache ? *used - cache : 0;
  lower(limit, *most > held ? *most - held : 0, "limit of control group " + directory);
}

// All control groups that the process is in, from its own up to the root.
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
  if (const auto num_bytes = pretended.load()) {
    return {num_bytes, "as a test pretends"};
  }
  MemoryLimit limit{kNoLimit, "no limit known"};
  if (const auto available = mem_info("MemAvailable")) {
    lower(limit, *available, "MemAvailable of /proc/meminfo");
  }
  lower_to_groups(limit);
  return limit;
}

void pretend_available_memory(std::size_t num_bytes) {
  pretended.store(num_bytes);
}

}  // namespace ddpx::shm
