// Arithmetic as IEEE 754 has it, whatever the thread was set to.
#pragma once

#include <cfenv>

namespace ddpx::shm {

// A user's thread may flush denormals or round otherwise (torch.set_flush_denormal), and another
// rank's may not: results would differ between ranks.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    std::fesetenv(&saved_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace ddpx::shm
