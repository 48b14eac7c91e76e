// Lets no thread start.
#pragma once

#include <pthread.h>

#include <cstddef>

namespace ddpx::shm {

// Gives threads a stack size that exceeds the address space, so that no thread can start.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes = before_;
    pthread_attr_setstacksize(&attributes, std::size_t{1} << 50);
    pthread_setattr_default_np(&attributes);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace ddpx::shm
