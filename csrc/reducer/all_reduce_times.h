// Measures all-reduces, for the search of a bucket plan (ddpx/planning/search.py).
#pragma once

#include <cstdint>
#include <vector>

#include "reducer.h"

namespace ddpx {

// The times in ns of all-reduces of this size in the memory of buckets, one after another. A
// collective call. UserError within a backward.
std::vector<int64_t> time_all_reduces(Reducer& reducer, int64_t num_bytes, int repeats);

}  // namespace ddpx
