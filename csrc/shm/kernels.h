// The arithmetic: kernels that combine the values of several ranks.
#pragma once

#include <cstddef>

#include "types.h"

namespace ddpx::shm {

// The arguments of a kernel. A result may be one of the sources; other buffers must not overlap.
// Buffers must be aligned to their elements.
struct Reduction {
  const std::byte* const* sources;  // in the order of combination
  int num_sources;
  std::byte* const* results;  // each receives the same values
  int num_results;
  std::size_t count;  // number of elements
  int divisor;        // used by kAvg only
};

// Computes acc = sources[0], then acc = combine(sources[k], acc) for k = 1, 2, ..., and rounds to
// the dtype after each combination. The bits are those of gloo. The later source is the left
// operand, which determines the results of MIN and MAX for NaN and signed zeros. 16-bit floats are
// added as float and rounded to nearest even.
using Kernel = void (*)(const Reduction&);

// Returns null if the op is not defined for the dtype.
Kernel find_kernel(DType dtype, ReduceOp op);

}  // namespace ddpx::shm
