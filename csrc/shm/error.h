// The error type of the shared-memory transport, and the parts that its texts share.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "../count.h"
#include "../os/error.h"

namespace ddpx::shm {

enum class ErrorKind : int {
  kMisuse,       // the call is invalid on every rank: an unknown dtype, AVG of integers
  kMismatch,     // ranks called different operations
  kPeerLost,     // a rank died or left the group
  kTimeout,      // ranks did not arrive in time
  kOutOfMemory,  // memory could not be allocated
  kSystem,       // a system call failed unexpectedly
  kAborted,      // a rank aborted or destroyed the group
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, int culprit = -1)
      : std::runtime_error(text), kind_(kind), culprit_(culprit) {}

  ErrorKind kind() const {
    return kind_;
  }

  // The rank of the whole group that caused the error: a lost rank, or the first missing rank. -1
  // if no rank is known.
  int culprit() const {
    return culprit_;
  }

 private:
  ErrorKind kind_;
  int culprit_;
};

// "[ddpx shm rank R, phase P] ". `name` is that of the rank: "rank R".
std::string opening(const std::string& name, const std::string& phase);

// The text without its opening. Failures are stored in this form, since each rank that reports a
// failure adds its own opening.
std::string without_opening(const std::string& text);

// The text of any exception. "an unknown error" if it has none.
std::string text_of(const std::exception_ptr& error);

Error from_os(const os::Error& error);

// A kSystem error with the text of errno, which must still be that of the failed `call`.
inline Error system_error(const std::string& call) {
  return from_os(os::system_error(call));
}

// Calls functions of os/. Rethrows their errors as an Error.
template <class Call>
auto with_own_errors(const Call& call) {
  try {
    return call();
  } catch (const os::Error& error) {
    throw from_os(error);
  }
}

}  // namespace ddpx::shm
