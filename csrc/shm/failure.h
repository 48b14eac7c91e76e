// Why the group cannot go on: written once, by whoever notices first, and read by all.
#pragma once

#include <optional>
#include <string>

#include "error.h"
#include "layout.h"

namespace ddpx::shm {

struct Failure {
  ErrorKind kind;
  std::string text;  // without an opening: every rank puts its own before it
  int culprit = -1;  // a rank, or -1
};

// Writes `failure` into the record unless there is one. Returns what stands there afterwards.
Failure record_failure(FailureRecord& record, const Failure& failure);

std::optional<Failure> read_failure(const FailureRecord& record);

}  // namespace ddpx::shm
