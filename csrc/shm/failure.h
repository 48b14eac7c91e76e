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

// Writes a failure into the record. Returns false if the record holds a failure already. Allocates
// no memory.
bool record_failure(
    FailureRecord& record, ErrorKind kind, std::string_view text, int culprit) noexcept;

// The same, but returns the failure that the record holds afterwards.
Failure record_failure(FailureRecord& record, const Failure& failure);

// Whether the record holds a failure, or a rank is writing one.
bool has_failed(const FailureRecord& record) noexcept;

// Waits for a rank that is writing the record. Returns nullopt if there is no failure.
std::optional<Failure> read_failure(const FailureRecord& record);

}  // namespace ddpx::shm
