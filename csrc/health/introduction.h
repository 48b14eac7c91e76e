// What a rank tells its peers of itself, once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "process.h"

namespace ddpx::health {

struct Introduction {
  std::string host;
  ProcessId process;
  int page_fd = -1;    // in that process
  uint64_t token = 0;  // of the page

  std::string to_text() const;
  // None if it is not the text of one.
  static std::optional<Introduction> from_text(const std::string& text);

  // Of this process. `identity` makes ranks of one machine pass for ranks of several, in tests.
  static Introduction own(const std::string& identity, int page_fd, uint64_t token);
};

// Unlikely to be the same for two pages.
uint64_t new_token();

}  // namespace ddpx::health
