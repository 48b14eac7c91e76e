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
inline std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

// nullopt if the key does not exist. Does not wait for the key, and takes one request.
inline std::optional<std::string> get_text(c10d::Store& store, const std::string& key) {
  // If the key does not exist, compareSet returns the expected value.
  const std::string none = "ddpx: no such key";
  const auto text = to_text(store.compareSet(key, to_bytes(none), to_bytes(none)));
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
    auto standing = to_text(store.compareSet(key, to_bytes(before), to_bytes(wanted)));
    if (standing == wanted) {
      return;
    }
    before = std::move(standing);
  }
}

}  // namespace ddpx
