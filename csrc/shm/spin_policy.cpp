#include "spin_policy.h"

#include <algorithm>

namespace ddpx::shm {

SpinPolicy choose_spin_policy(const std::vector<os::CpuLimits>& local_ranks, int own_index) {
  const auto& own = local_ranks[own_index];
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const auto& limits : local_ranks) {
    CPU_OR(&cores, &cores, &limits.cores);
  }
  const auto num_sharing =
      std::count_if(local_ranks.begin(), local_ranks.end(), [&](const os::CpuLimits& limits) {
        return limits.quota_group == own.quota_group;
      });
  if (static_cast<int>(local_ranks.size()) <= CPU_COUNT(&cores) &&
      (own.quota_group == 0 || static_cast<double>(num_sharing) <= own.quota_cores)) {
    return {std::chrono::microseconds(20), 2};
  }
  return {std::chrono::microseconds(0), 16};
}

}  // namespace ddpx::shm
