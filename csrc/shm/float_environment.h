// Arithmetic as IEEE 754 has it, whatever the thread was set to.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace ddpx::shm {

// A user's thread may flush denormals or round otherwise (torch.set_flush_denormal), and another
// rank's may not: results would differ between ranks.
class DefaultFloatEnvironment {
 public:
#if defined(__SSE2__)
  // All that the kernels' instructions heed; the C library's way takes as long as a small sum.
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);  // all exceptions masked, rounding to nearest, denormals kept
  }
  ~DefaultFloatEnvironment() {
    _mm_setcsr(saved_);
  }
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    std::fesetenv(&saved_);
  }
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__SSE2__)
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace ddpx::shm
