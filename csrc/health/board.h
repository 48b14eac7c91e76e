// Where ranks leave texts for each other: the store of their process group.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ddpx::health {

// Used by one thread at a time. Any call may take long, or throw once the store is gone.
class Board {
 public:
  virtual ~Board() = default;

  virtual void set(const std::string& key, const std::string& text) = 0;

  // None if nobody has set it; does not wait for it.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  // Unless someone has set it. Returns what stands there afterwards.
  virtual std::string set_first(const std::string& key, const std::string& text) = 0;

  // Says whether the process that serves the texts has ended, as far as that can be told. May take
  // a second. Unlike the board, for any thread.
  virtual std::function<bool()> server_ended() const = 0;
};

}  // namespace ddpx::health
