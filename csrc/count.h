// Numbers and lists in error texts.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ddpx {

// "1 rank", "2 ranks".
template <typename Number>
std::string count(Number number, const std::string& noun) {
  return std::to_string(number) + ' ' + noun + (number == 1 ? "" : "s");
}

// "rank 3", "ranks 1, 2 and 5".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// "'a', 'b' and 3 more".
inline std::string join_names(const std::vector<std::string>& names, std::size_t most = 8) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < most; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  return names.size() > most ? text + " and " + std::to_string(names.size() - most) + " more"
                             : text;
}

}  // namespace ddpx
