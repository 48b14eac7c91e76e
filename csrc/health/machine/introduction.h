// The text by which a rank introduces itself to the other ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../../os/process.h"

namespace ddpx::health {

struct Introduction {
  static constexpr std::size_t kMostBytes = 216;  // of the text

  int rank = 0;
  std::string host;
  os::ProcessId process;
  int page_fd = -1;    // of the status page, in that process
  uint64_t token = 0;  // of the status page

  std::string to_text() const;
  // nullopt if the text is malformed.
  static std::optional<Introduction> from_text(const std::string& text);

  // Introduces this process. Tests pass `identity`: ranks with different identities treat each
  // other as ranks of different machines.
  static Introduction own(int rank, const std::string& identity, int page_fd, uint64_t token);
};

// A random number, different for each status page.
uint64_t new_token();

}  // namespace ddpx::health
