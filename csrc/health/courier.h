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

// As far as its answers show.
enum class StoreState {
  kAnswers,  // or is not asked
  kLate,     // has just given a late answer: others may have yet to tell what they could not
  kOverdue,  // owes one
  kLost,     // has owed an answer for 2 s, or the connection broke
};

// The store may be slow, or gone: only this one's thread ever waits for it, and nobody for that
// thread. On one machine it ends when this rank has met all, and all have met it. Thread-safe.
class Courier {
 public:
  // What this rank's machine launched, for the rank that compares it with its own.
  struct Calls {
    int counterpart;
    std::string text;
  };

  // Called on the courier's thread. `meet` says whether the introduction was of use; if not it is
  // asked for again. `beat` is what to tell other machines; `heard` is what they have told.
  // `compare_calls` is told what the counterpart's machine launched, and says of which failure that
  // tells.
  struct Duties {
    std::function<bool(int rank, const Introduction&)> meet;
    std::function<Peer::Beat()> beat;
    std::function<bool()> met;  // by all of this rank's machine that it has met itself
    std::function<std::vector<int>()> far_ranks;  // those of other machines
    std::function<bool()> curious;                // whether to ask what these have told
    std::function<void(int rank, const Peer::Beat&)> heard;
    std::function<std::optional<Calls>()> calls_to_tell;  // none: another rank does
    std::function<std::optional<std::string>(int rank, const std::string& calls)> compare_calls;
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

  // Begins with its duties.
  void start();

  // Whether there are ranks that cannot see this one's page, or may not have met it.
  bool is_needed() const;

  // For those; the first failure stands.
  void post_failure(const std::string& failure);

  // Waits until what was posted is out, or for as long as that.
  bool flush(std::chrono::steady_clock::time_point deadline);

  // Asks the store at once for what it asks for now and then.
  void hurry();

  StoreState store_state() const;
  bool broken() const;  // its connection: it is lost, for good

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
