// Carries what ranks tell each other through the store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "board.h"
#include "introduction.h"
#include "peer.h"

namespace ddpx::health {

// The store may be slow, or gone: only this one's thread ever waits for it, and nobody for that
// thread. On one machine it ends when all ranks have met. Thread-safe.
class Courier {
 public:
  // Called on the courier's thread. `meet` says whether the introduction was of use; if not it is
  // asked for again. `beat` is what to tell other machines; `heard` is what they have told.
  struct Duties {
    std::function<bool(int rank, const Introduction&)> meet;
    std::function<Peer::Beat()> beat;
    std::function<std::vector<int>()> far_ranks;  // those of other machines
    std::function<bool()> curious;                // whether to ask what these have told
    std::function<void(int rank, const Peer::Beat&)> heard;
    std::function<void(const std::string& failure)> failed;
  };

  Courier(
      std::unique_ptr<Board> board,
      int rank,
      int world_size,
      const Introduction& own,
      Duties duties);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Tells ranks on other machines; the first failure stands.
  void post_failure(const std::string& failure);

  // Until what was posted is out, or time is up.
  bool flush(std::chrono::milliseconds timeout);

  // Asks the store at once for what it asks for now and then.
  void hurry();

  // Whether the store is lost, or has owed an answer for so long: one that is well takes less.
  static constexpr auto kTimeToAnswer = std::chrono::milliseconds(300);
  bool silent(std::chrono::milliseconds time = kTimeToAnswer) const;

  // Whether the store's process was found to have ended. Does not wait: look_for_server() starts
  // to find out, on a thread of its own.
  bool server_ended() const;
  void look_for_server();

 private:
  struct State;

  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace ddpx::health
