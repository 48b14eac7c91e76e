// How ranks find each other before they share memory: a few keys that one sets and others get.
#pragma once

#include <chrono>
#include <string>

namespace ddpx::shm {

// c10d's Store behind an adapter, or a map in tests. Keys are used once and never removed, so a
// second group needs a channel with another prefix. Called by one thread of each rank.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Waits until the key is set. Throws whatever it likes if that takes longer than `timeout`.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace ddpx::shm
