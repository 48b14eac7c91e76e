// The mutex of a reducer, and the thread that occupies the reducer.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "../errors.h"

namespace ddpx {

// A recursive mutex that counts how often its thread holds it.
class CountingMutex {
 public:
  void lock() {
    mutex_.lock();
    ++num_holds_;
  }
  bool try_lock() {
    if (!mutex_.try_lock()) {
      return false;
    }
    ++num_holds_;
    return true;
  }
  void unlock() {
    --num_holds_;
    mutex_.unlock();
  }

  // With the mutex held, before a wait that releases the mutex once. If the thread holds the mutex
  // more often, no other thread could enter meanwhile.
  void check_held_once() const {
    if (num_holds_ != 1) {
      throw InternalError("a thread would wait while it holds the mutex of the reducer twice");
    }
  }

 private:
  std::recursive_mutex mutex_;
  int num_holds_ = 0;  // the mutex guards it
};

// No thread waits for communication, or runs a communication hook, while it holds the mutex: it
// releases the mutex with Unlocked. A thread that must have the reducer to itself meanwhile
// occupies it with Occupation. Other threads may still look at the reducer.
//
// Recursive: a warning, or a tensor that is dropped, may run Python code that looks at the reducer.
// Such code must not wait: a wait throws InternalError if the thread holds the mutex more than
// once.
class ExclusiveMutex {
 public:
  using Lock = std::unique_lock<CountingMutex>;

  // For a call that reads, or that changes a setting of the next step.
  Lock lock() const {
    return Lock(mutex_);
  }
  Lock try_lock() const {
    return Lock(mutex_, std::try_to_lock);
  }

  // For a call that may change the reducer: waits until no other thread occupies the reducer.
  Lock lock_to_change() const {
    return lock_when([this] { return !occupied_by_other(); });
  }

  // Waits until `ready()` returns true. lock_when() calls `ready` with the mutex held: at once, and
  // whenever an occupation ends. A change that makes `ready` true must therefore come with the end
  // of an occupation.
  template <typename Predicate>
  Lock lock_when(const Predicate& ready) const {
    Lock lock(mutex_);
    while (!ready()) {
      mutex_.check_held_once();
      vacated_.wait(lock);
    }
    return lock;
  }

  // With the mutex held.
  bool occupied_by_other() const {
    return occupant_ && *occupant_ != std::this_thread::get_id();
  }

  // The calling thread occupies the reducer during the lifetime of this object. Made and destroyed
  // with the mutex held.
  class Occupation {
   public:
    explicit Occupation(const ExclusiveMutex& mutex) : mutex_(mutex), outermost_(!mutex.occupant_) {
      mutex_.occupant_ = std::this_thread::get_id();
    }
    ~Occupation() {
      if (outermost_) {
        mutex_.occupant_.reset();
        mutex_.vacated_.notify_all();
      }
    }
    Occupation(const Occupation&) = delete;
    Occupation& operator=(const Occupation&) = delete;

   private:
    const ExclusiveMutex& mutex_;
    bool outermost_;
  };

  // The calling thread, which holds the mutex once, releases it during the lifetime of this object.
  class Unlocked {
   public:
    explicit Unlocked(const ExclusiveMutex& mutex) : mutex_(mutex.mutex_) {
      mutex_.check_held_once();
      mutex_.unlock();
    }
    ~Unlocked() {
      mutex_.lock();
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

   private:
    CountingMutex& mutex_;
  };

 private:
  mutable CountingMutex mutex_;
  mutable std::condition_variable_any vacated_;
  mutable std::optional<std::thread::id> occupant_;
};

}  // namespace ddpx
