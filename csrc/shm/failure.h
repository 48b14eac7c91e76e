// Why the group cannot go on: written once, by whoever notices first, and read by all.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "error.h"
#include "layout.h"

namespace ddpx::shm {

struct Failure {
  ErrorKind kind;
  std::string text;  // without an opening: every rank puts its own before it
  int culprit = -1;  // a rank, or -1
};

// Writes a failure into the record unless there is one: then returns false. Allocates nothing.
bool record_failure(
    FailureRecord& record, ErrorKind kind, std::string_view text, int culprit) noexcept;

// The same; returns what stands there afterwards.
Failure record_failure(FailureRecord& record, const Failure& failure);

// Whether there is one, or one is being written.
bool has_failed(const FailureRecord& record) noexcept;

std::optional<Failure> read_failure(const FailureRecord& record);

}  // namespace ddpx::shm
