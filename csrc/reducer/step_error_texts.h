// The place of an error, and parts of the texts of step_errors.h.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "../count.h"
#include "phase.h"

namespace ddpx::errors {

// The place of an error. A text with a place begins with "[ddpx rank R, step S, phase P] ".
struct Where {
  int rank;
  int64_t step;  // number of synchronized steps that ended before
  Phase phase;
};

inline std::string opening(const Where& where) {
  std::ostringstream out;
  out << "[ddpx rank " << where.rank << ", step " << where.step << ", phase "
      << to_string(where.phase) << "] ";
  return out.str();
}

inline std::string count_params(std::size_t number) {
  return count(number, "parameter");
}

// `one` or `several`, which are the singular and the plural of a part of a sentence.
inline std::string by_number(
    std::size_t count, const std::string& one, const std::string& several) {
  return count == 1 ? one : several;
}

}  // namespace ddpx::errors
