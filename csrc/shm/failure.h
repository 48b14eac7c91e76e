// The reason why the group cannot continue. The first rank that detects a failure writes it, and
// all local ranks read it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "error.h"
#include "layout.h"

namespace ddpx::shm {

struct Failure {
  ErrorKind kind;
  std::string text;  // without an opening, since each rank adds its own
  int culprit = -1;  // the rank that caused the failure, or -1
};

// The failure has the error's text without its opening.
Failure failure_of(const Error& error);

// Declares a failure. Returns false if another failure is the first. Allocates no memory.
bool record_failure(
    FirstFailure& first, ErrorKind kind, std::string_view text, int culprit) noexcept;

// The same, but returns the first failure.
Failure record_failure(FirstFailure& first, const Failure& failure);

// One atomic load.
bool has_failed(const FirstFailure& first) noexcept;

std::optional<Failure> read_failure(const FirstFailure& first);

}  // namespace ddpx::shm
