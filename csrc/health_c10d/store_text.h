// Texts in a store.
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

// nullopt if the key does not exist. Does not wait for the key, and takes one request.
inline std::optional<std::string> get_text(c10d::Store& store, const std::string& key) {
  // Of a key that does not exist, compareSet returns the expected value.
  const std::string none = "ddpx: no such key";
  const auto value = store.compareSet(key, to_bytes(none), to_bytes(none));
  const std::string text(value.begin(), value.end());
  return text == none ? std::nullopt : std::make_optional(text);
}

// Sets a key that does not exist. Returns its text afterwards.
inline std::string set_first_text(
    c10d::Store& store, const std::string& key, const std::string& text) {
  const auto standing = store.compareSet(key, std::vector<uint8_t>(), to_bytes(text));
  return {standing.begin(), standing.end()};
}

}  // namespace ddpx
