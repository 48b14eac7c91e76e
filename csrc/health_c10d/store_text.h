// Texts in a store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ddpx {

inline std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// nullopt if the key does not exist. Does not wait for the key, and takes one request.
inline std::optional<std::string> get_text(c10d::Store& store, const std::string& key) {
  // If the key does not exist, compareSet returns the expected value.
  const std::string none = "ddpx: no such key";
  const auto value = store.compareSet(key, to_bytes(none), to_bytes(none));
  const std::string text(value.begin(), value.end());
  return text == none ? std::nullopt : std::make_optional(text);
}

// A key that does not exist counts as empty.
inline void append_text(c10d::Store& store, const std::string& key, const std::string& text) {
  if (store.hasExtendedApi()) {
    store.append(key, to_bytes(text));
    return;
  }
  // FileStore, for example, cannot append.
  auto before = get_text(store, key).value_or("");
  while (true) {
    const auto wanted = before + text;
    const auto value = store.compareSet(key, to_bytes(before), to_bytes(wanted));
    std::string standing(value.begin(), value.end());
    if (standing == wanted) {
      return;
    }
    before = std::move(standing);
  }
}

// Sets a key unless it exists. Returns its text afterwards.
inline std::string set_first_text(
    c10d::Store& store, const std::string& key, const std::string& text) {
  const auto standing = store.compareSet(key, std::vector<uint8_t>(), to_bytes(text));
  return {standing.begin(), standing.end()};
}

}  // namespace ddpx
