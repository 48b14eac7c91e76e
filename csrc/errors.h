// The two kinds of error.
#pragma once

#include <stdexcept>
#include <string>

namespace ddpx {

// A mistake of the user's script, or a failure of the job. Python raises RuntimeError.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A broken invariant: a bug of ddpx, as its text says. Python raises RuntimeError.
class InternalError : public std::logic_error {
 public:
  explicit InternalError(const std::string& what);
};

}  // namespace ddpx
