// What ranks launched in a step, compared.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "page.h"

namespace ddpx::health {

// Whether two ranks may have made the same collective calls in a step. Those of a rank that is not
// through with it, or has no results, are not known in full; it may be an attempt at the step that
// broke off. `same_sequence`: ranks whose calls are the same have the same Trail::sequence.
bool same_calls(const Trail& a, const Trail& b, bool same_sequence);

// How they differ, of the step that the first of `ranks` is about.
std::string describe_mismatch(const std::vector<std::pair<int, Trail>>& ranks);

}  // namespace ddpx::health
