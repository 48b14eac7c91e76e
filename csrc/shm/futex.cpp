#include "futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ddpx::shm {

// Not FUTEX_PRIVATE_FLAG: the sleepers are in other processes, at other addresses.

void futex_wait(const Word& word, uint32_t seen, std::chrono::nanoseconds most) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(most.count() / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(most.count() % 1'000'000'000);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(const Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ddpx::shm
