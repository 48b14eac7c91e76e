#include "spin_policy.h"

#include <sched.h>

#include <thread>

namespace ddpx::shm {

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) {
    return CPU_COUNT(&cores);
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

SpinPolicy choose_spin_policy(int num_local_ranks, int num_cores) {
  if (num_local_ranks <= num_cores) {
    return {std::chrono::microseconds(20), 2};
  }
  return {std::chrono::microseconds(0), 16};
}

}  // namespace ddpx::shm
