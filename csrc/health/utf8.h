// Texts that users and other processes wrote, on their way to Python.
#pragma once

#include <cstddef>
#include <string>

namespace ddpx::health {

// The length of the longest beginning of `text` with at most `most` bytes that ends between two
// characters.
inline std::size_t cut_utf8(const std::string& text, std::size_t most) {
  if (text.size() <= most) {
    return text.size();
  }
  const auto continues = [&text](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  while (most > 0 && continues(most)) {
    --most;
  }
  return most;
}

}  // namespace ddpx::health
