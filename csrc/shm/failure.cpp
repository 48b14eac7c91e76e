#include "failure.h"

#include <algorithm>
#include <cstring>

namespace ddpx::shm {

Failure failure_of(const Error& error) {
  return {error.kind(), without_opening(error.what()), error.culprit()};
}

bool has_failed(const FirstFailure& first) noexcept {
  return first.get() != nullptr;
}

std::optional<Failure> read_failure(const FirstFailure& first) {
  const auto* record = first.get();
  if (record == nullptr) {
    return std::nullopt;
  }
  const bool known = record->kind >= 0 && record->kind <= static_cast<int>(ErrorKind::kAborted);
  return Failure{
      known ? static_cast<ErrorKind>(record->kind) : ErrorKind::kSystem,
      std::string(record->text, strnlen(record->text, sizeof(record->text))),
      std::max(record->culprit, -1)};
}

bool record_failure(
    FirstFailure& first, ErrorKind kind, std::string_view text, int culprit) noexcept {
  return first.declare([&](FailureRecord& record) {
    record.kind = static_cast<int32_t>(kind);
    record.culprit = culprit;
    const auto length = std::min(text.size(), sizeof(record.text) - 1);
    std::memcpy(record.text, text.data(), length);
  });
}

Failure record_failure(FirstFailure& first, const Failure& failure) {
  record_failure(first, failure.kind, failure.text, failure.culprit);
  return read_failure(first).value_or(failure);
}

}  // namespace ddpx::shm
