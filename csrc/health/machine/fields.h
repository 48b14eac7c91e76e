// Several texts of any content in one text.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace ddpx::health {

template <class Number>
std::optional<Number> to_number(const std::string& text) {
  Number value = 0;
  const auto* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return rest == end && error == std::errc() ? std::make_optional(value) : std::nullopt;
}

// Netstrings: "3:abc0:". The concatenation of two results has the fields of both.
inline std::string join_fields(const std::vector<std::string>& fields) {
  std::string out;
  for (const auto& field : fields) {
    out += std::to_string(field.size()) + ":" + field;
  }
  return out;
}

// Returns the fields before the first one that is cut off or malformed.
inline std::vector<std::string> split_fields(const std::string& text) {
  std::vector<std::string> fields;
  for (std::size_t at = 0; at < text.size();) {
    const auto colon = text.find(':', at);
    const auto length = colon == std::string::npos
                            ? std::nullopt
                            : to_number<std::size_t>(text.substr(at, colon - at));
    if (!length || *length > text.size() - colon - 1) {
      break;
    }
    fields.push_back(text.substr(colon + 1, *length));
    at = colon + 1 + *length;
  }
  return fields;
}

}  // namespace ddpx::health
