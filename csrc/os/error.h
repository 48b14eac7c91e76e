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

// An error with the text of errno, which must still be that of the failed `call`.
Error system_error(const std::string& call);

}  // namespace ddpx::os
