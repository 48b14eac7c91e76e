// The default floating-point environment of IEEE 754.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace ddpx::shm {

// Sets the default environment of the calling thread in its scope. Otherwise results could differ
// between ranks: the user's thread of one rank may flush denormals (torch.set_flush_denormal) or
// use another rounding mode.
class DefaultFloatEnvironment {
 public:
#if defined(__SSE2__)
  // MXCSR controls all instructions of the kernels. fegetenv takes as long as a small sum.
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);  // all exceptions masked, round to nearest, keep denormals
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
