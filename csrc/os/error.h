// Errors of system calls.
#pragma once

#include <stdexcept>
#include <string>

namespace ddpx::os {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// The cause of EMFILE and ENFILE, with a remedy. Follows the text of an error.
inline constexpr const char* kManyFiles =
    ". This process, or all processes of its user together, have too many open files. Raise the "
    "limit (ulimit -n), or start fewer ranks on this host.";

// An error with the text of errno, which must still be that of the failed `call`.
Error system_error(const std::string& call);

}  // namespace ddpx::os
