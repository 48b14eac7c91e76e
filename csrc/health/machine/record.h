// The binary format of everything that ranks write for each other, except single words.
//
// A record is the concatenation of its values. A text or a vector follows its length. All ranks run
// on machines with the same byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace ddpx::health {

// A value of which all bytes count.
template <class Value>
concept Plain = std::is_trivially_copyable_v<Value> &&
                (std::is_enum_v<Value> || std::has_unique_object_representations_v<Value>);

template <Plain Value>
void append_value(std::string& record, const Value& value) {
  record.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class Sequence>  // std::string, or std::vector of plain values
void append_value(std::string& record, const Sequence& values) {
  append_value(record, static_cast<uint32_t>(values.size()));
  record.append(
      reinterpret_cast<const char*>(values.data()),
      values.size() * sizeof(typename Sequence::value_type));
}

// Takes a value off the beginning of `record`. Returns false if the record is too short.
template <Plain Value>
bool take_value(std::string_view& record, Value& value) {
  if (record.size() < sizeof(value)) {
    return false;
  }
  std::memcpy(&value, record.data(), sizeof(value));
  record.remove_prefix(sizeof(value));
  return true;
}

template <class Sequence>
bool take_value(std::string_view& record, Sequence& values) {
  constexpr std::size_t kSize = sizeof(typename Sequence::value_type);
  uint32_t count = 0;
  if (!take_value(record, count) || count > record.size() / kSize) {
    return false;
  }
  values.resize(count);
  if (count > 0) {  // memcpy() needs valid pointers, and both may be null without values
    std::memcpy(values.data(), record.data(), count * kSize);
  }
  record.remove_prefix(count * kSize);
  return true;
}

template <class... Values>
std::string encode(const Values&... values) {
  std::string record;
  (append_value(record, values), ...);
  return record;
}

// Takes these values off the beginning of `record`. Returns false if the record is cut off, or
// malformed.
template <class... Values>
bool decode(std::string_view& record, Values&... values) {
  return (take_value(record, values) && ...);
}

// Consecutive numbers.
struct Run {
  uint32_t first = 0;
  uint32_t last = 0;
};

// `numbers` ascend.
template <class Numbers>
std::vector<Run> to_runs(const Numbers& numbers) {
  std::vector<Run> runs;
  for (const auto number : numbers) {
    const auto value = static_cast<uint32_t>(number);
    if (!runs.empty() && runs.back().last + 1 == value) {
      runs.back().last = value;
    } else {
      runs.push_back({value, value});
    }
  }
  return runs;
}

// The numbers below `limit`.
template <class Number>
std::vector<Number> from_runs(const std::vector<Run>& runs, uint32_t limit) {
  std::vector<Number> numbers;
  for (const auto& run : runs) {
    for (auto number = run.first; number <= run.last && number < limit; ++number) {
      numbers.push_back(static_cast<Number>(number));
    }
  }
  return numbers;
}

}  // namespace ddpx::health
