// Texts in a store, for ranks that must not wait there for each other.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddpx {

inline std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// None if nobody has set it; does not wait for it.
inline std::optional<std::string> get_text(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) {
    return std::nullopt;
  }
  const auto value = store.get(key);
  return std::string(value.begin(), value.end());
}

// Unless someone has set it. Returns what stands there afterwards.
inline std::string set_first_text(
    c10d::Store& store, const std::string& key, const std::string& text) {
  const auto standing = store.compareSet(key, std::vector<uint8_t>(), to_bytes(text));
  return {standing.begin(), standing.end()};
}

}  // namespace ddpx
