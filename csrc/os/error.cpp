#include "error.h"

#include <cerrno>
#include <cstring>

namespace ddpx::os {

Error system_error(const std::string& call) {
  const int code = errno;
  const bool many_files = code == EMFILE || code == ENFILE;
  return Error(
      call + " failed: " + std::strerror(code) + " (errno " + std::to_string(code) + ")" +
      (many_files ? kManyFiles : ""));
}

}  // namespace ddpx::os
