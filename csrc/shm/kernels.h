// The arithmetic: combines several ranks' values of a range of elements.
#pragma once

#include <cstddef>

#include "types.h"

namespace ddpx::shm {

// `results` may be the very buffers of `sources`; otherwise nothing may overlap. Buffers are
// aligned to their elements at least.
struct Reduction {
  const std::byte* const* sources;  // in the order in which they are combined
  int num_sources;
  std::byte* const* results;  // all get the same
  int num_results;
  std::size_t count;  // elements
  int divisor;        // of kAvg; otherwise ignored
};

// acc = sources[0]; then acc = combine(sources[k], acc) for k = 1, 2, ..., each time rounded to the
// dtype. To the bit what gloo computes: the later source is the left operand, which decides what
// MIN and MAX make of NaN and of zeros; 16-bit floats are added as float and rounded to even.
using Kernel = void (*)(const Reduction&);

// None if the op is not defined for the dtype.
Kernel find_kernel(DType dtype, ReduceOp op);

}  // namespace ddpx::shm
