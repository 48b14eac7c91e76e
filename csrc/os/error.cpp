#include "error.h"

#include <cerrno>
#include <cstring>

namespace ddpx::os {

Error system_error(const std::string& call) {
  const int code = errno;
  return Error(call + " failed: " + std::strerror(code) + " (errno " + std::to_string(code) + ")");
}

}  // namespace ddpx::os
