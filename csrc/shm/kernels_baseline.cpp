// The kernels for every machine that the compiler targets.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

// Vectorized at every optimization level of the build: a large all-reduce spends its time in these
// loops.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#define DDPX_SHM_ISA baseline
#include "kernels_body.h"
