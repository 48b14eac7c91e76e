// The key-value store through which ranks find each other before they share memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddpx::shm {

// Implemented by an adapter of c10d's Store, and by a map in tests. The caller of the rendezvous
// owns it, and one thread of each rank calls it. Keys are used once and never removed, so a second
// group needs a channel with another prefix.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // A key that does not exist counts as the empty text.
  virtual void append(const std::string& key, const std::string& value) = 0;

  // Adds 1 to a number. Returns the sum. A key that does not exist counts as 0.
  virtual int64_t count_up(const std::string& key) = 0;

  // Waits until the key is set. Throws an exception of any type after `timeout`.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace ddpx::shm
