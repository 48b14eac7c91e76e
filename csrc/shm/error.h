// The one error type of the shared-memory transport, and where its texts get their opening.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace ddpx::shm {

enum class ErrorKind : int {
  kMisuse,       // a call that can never work: an unknown dtype, AVG of integers
  kMismatch,     // ranks called different operations
  kPeerLost,     // a rank died or left
  kTimeout,      // ranks did not arrive in time
  kOutOfMemory,  // shared memory could not be had
  kSystem,       // a system call failed that should not
  kAborted,      // someone gave up on purpose
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, std::vector<int> culprits = {})
      : std::runtime_error(text), kind_(kind), culprits_(std::move(culprits)) {}

  ErrorKind kind() const {
    return kind_;
  }

  // Ranks (of the whole group) that it is about: the dead, the missing. May be empty.
  const std::vector<int>& culprits() const {
    return culprits_;
  }

 private:
  ErrorKind kind_;
  std::vector<int> culprits_;
};

// "[ddpx shm rank R, phase P] ".
std::string opening(int rank, const std::string& phase);

// An error's text as it goes into a failure, which every rank puts an opening of its own before.
std::string without_opening(const std::string& text);

// "rank 3", "ranks 1, 2 and 5".
std::string list_ranks(const std::vector<int>& ranks);

// kSystem, with errno's text; `call` says what failed. Reads errno.
Error system_error(const std::string& call);

}  // namespace ddpx::shm
