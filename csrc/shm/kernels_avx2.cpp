// The kernels for x86 processors with AVX2 (since about 2013). Only these loops are compiled for
// AVX2: the linker could choose an AVX2 instance of a standard library template for all callers.
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
