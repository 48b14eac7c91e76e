// The store of a process group: texts by key that all ranks can read and write.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ddpx::health {

// One connection to the store. Owned by the thread that calls it. A call may block, and throws if
// the connection is lost.
class Store {
 public:
  virtual ~Store() = default;

  // Sets all keys to the same text.
  virtual void set(const std::vector<std::string>& keys, const std::string& text) = 0;

  // nullopt if the key does not exist. Does not wait for the key.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  // Sets a key that does not exist. Returns the key's text afterwards.
  virtual std::string set_first(const std::string& key, const std::string& text) = 0;

  virtual void append(const std::string& key, const std::string& text) = 0;

  // Returns the sum. A key that does not exist counts as 0.
  virtual int64_t add(const std::string& key, int64_t value) = 0;

  // All keys must exist.
  virtual std::vector<std::string> multi_get(const std::vector<std::string>& keys) = 0;

  // Waits until the key exists, and deletes it. Ends only with the key, or with the connection.
  virtual void await(const std::string& key) = 0;
};

// The process that served the store has ended.
struct StoreEnded : std::runtime_error {
  StoreEnded() : std::runtime_error("the process of the store has ended") {}
};

// Opens a connection. May block for some seconds, and throws if the store cannot be reached.
// Returns null if the process group was destroyed.
using StoreAccess = std::function<std::unique_ptr<Store>()>;

}  // namespace ddpx::health
