// The record by which a rank introduces itself to the other ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "../../os/process.h"

namespace ddpx::health {

struct Introduction {
  static constexpr std::size_t kMostBytes = 152;  // of the record

  int rank = 0;
  std::string host;
  os::ProcessId process;
  int page_fd = -1;    // of the status page, in that process
  uint64_t token = 0;  // of the status page

  std::string encode() const;
  // nullopt if the record is malformed, or all zeros. Bytes behind the record are ignored.
  static std::optional<Introduction> decode(std::string_view record);

  // The introduction of this process. Tests pass `identity`: ranks with different identities treat
  // each other as ranks of different machines.
  static Introduction own(int rank, const std::string& identity, int page_fd, uint64_t token);
};

// A random number, different for each status page.
uint64_t new_token();

}  // namespace ddpx::health
