// Who may look at a reducer, and who may change it, while a thread occupies it.
#include "reducer/exclusive_mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "errors.h"

namespace ddpx {
namespace {

TEST(ExclusiveMutex, OtherThreadsLookButDoNotChange) {
  const ExclusiveMutex mutex;
  std::atomic<bool> changed{false};
  std::thread changer;
  {
    const auto lock = mutex.lock_to_change();
    const ExclusiveMutex::Occupation occupation(mutex);
    const ExclusiveMutex::Unlocked unlocked(mutex);
    std::thread([&] { EXPECT_TRUE(mutex.lock().owns_lock()); }).join();
    std::thread([&] { EXPECT_TRUE(mutex.lock_when([] { return true; })); }).join();
    changer = std::thread([&] {
      const auto waiting = mutex.lock_to_change();
      changed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(changed);
  }
  changer.join();
  EXPECT_TRUE(changed);
}

// A failed try_lock() of the watchdog must not change the count of another thread.
TEST(ExclusiveMutex, HoldsAreCountedBesideFailedAttempts) {
  CountingMutex mutex;
  std::atomic<bool> done{false};
  std::thread watchdog([&] {
    while (!done) {
      if (mutex.try_lock()) {
        mutex.unlock();
      }
    }
  });
  EXPECT_NO_THROW(for (int i = 0; i < 100'000; ++i) {
    const std::lock_guard<CountingMutex> lock(mutex);
    mutex.check_held_once();
  });
  done = true;
  watchdog.join();
}

TEST(ExclusiveMutex, TheOccupantMayEnterAgain) {
  const ExclusiveMutex mutex;
  const auto lock = mutex.lock_to_change();
  const ExclusiveMutex::Occupation outer(mutex);
  {
    const ExclusiveMutex::Occupation inner(mutex);
    EXPECT_TRUE(mutex.lock_to_change().owns_lock());
  }
  std::thread([&] { EXPECT_FALSE(mutex.try_lock().owns_lock()); }).join();
  EXPECT_FALSE(mutex.occupied_by_other());
}

// The wait would release the mutex once, so that no other thread could end it.
TEST(ExclusiveMutex, NoThreadWaitsThatHoldsItTwice) {
  const ExclusiveMutex mutex;
  const auto lock = mutex.lock();
  {
    const auto again = mutex.lock();
    EXPECT_THROW(const ExclusiveMutex::Unlocked unlocked(mutex), InternalError);
    EXPECT_THROW(mutex.lock_when([] { return false; }), InternalError);
    EXPECT_TRUE(mutex.lock_when([] { return true; })) << "no wait";
  }
  const ExclusiveMutex::Unlocked unlocked(mutex);
  std::thread([&] { EXPECT_TRUE(mutex.try_lock().owns_lock()); }).join();
}

}  // namespace
}  // namespace ddpx
