// The kernels for any machine that the compiler targets.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

// Vectorised whatever the build's own level is: these loops are what a large all-reduce takes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#define DDPX_SHM_ISA baseline
#include "kernels_body.h"
