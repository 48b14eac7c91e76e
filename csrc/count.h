// Numbers in error texts.
#pragma once

#include <string>

namespace ddpx {

// "1 rank", "2 ranks".
template <typename Number>
std::string count(Number number, const std::string& noun) {
  return std::to_string(number) + ' ' + noun + (number == 1 ? "" : "s");
}

}  // namespace ddpx
