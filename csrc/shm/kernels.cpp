#include "kernels.h"

namespace ddpx::shm {
namespace baseline {

Kernel find(DType dtype, ReduceOp op);

}  // namespace baseline

namespace avx2 {

Kernel find(DType dtype, ReduceOp op);

}  // namespace avx2

namespace {

bool has_avx2() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
#else
  return false;
#endif
}

}  // namespace

Kernel find_kernel(DType dtype, ReduceOp op) {
  if (has_avx2()) {
    if (const auto kernel = avx2::find(dtype, op)) {
      return kernel;
    }
  }
  return baseline::find(dtype, op);
}

}  // namespace ddpx::shm
