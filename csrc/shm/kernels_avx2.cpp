// The kernels for x86 processors since about 2013. Nothing but these loops is compiled for them:
// a template of the standard library compiled here could be chosen by the linker for everyone.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#pragma GCC target("avx2")

#define DDPX_SHM_ISA avx2
#include "kernels_body.h"

#else

namespace ddpx::shm::avx2 {

Kernel find(DType, ReduceOp) {
  return nullptr;
}

}  // namespace ddpx::shm::avx2

#endif
