// The channel of one rank, with the threads that drive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host_channel.h"

namespace ddpx::health {

// The store, as its answers show.
enum class StoreState : uint32_t {
  kAnswers,  // or no request is necessary
  kSlow,     // it answers late, or has just done so: others may have been late to write, too
  kLost,     // no answer for 2 s, or the connection broke
  kSilent,   // no answer for a lease
  kEnded,    // its port refuses connections: its process has ended
};

// Owned by the monitor. Only the threads of this class wait for the store. They are detached, and
// share the channel, since they may wait for longer than the monitor lives. Thread-safe.
class ChannelThreads {
 public:
  ChannelThreads(
      HostChannel::Settings settings, std::shared_ptr<HostProbe> probe, StoreAccess access);
  ~ChannelThreads();
  ChannelThreads(const ChannelThreads&) = delete;
  ChannelThreads& operator=(const ChannelThreads&) = delete;

  // The start if all ranks meet in a collective call; see HostChannel. Replaces a start through the
  // store.
  uint64_t find_host(const std::vector<Introduction>& ranks);
  void meet(const std::vector<uint64_t>& hosts);

  // Starts through the store, unless ranks have met. look() does so after a moment.
  void introduce();

  // Null before the start. Lives as long as this object.
  HostTable* table() const;
  std::shared_ptr<HostTable> shared_table() const;

  // Called by the watchdog. Takes over where the keeper of the host does not renew the lease.
  // `awake_ns`: since when this process has not been stopped.
  void look(int64_t awake_ns);

  void post_failure(const std::string& text);
  void leave();

  // Waits until everything is posted. Returns false at `deadline`.
  bool flush(std::chrono::steady_clock::time_point deadline);

  StoreState store_state() const;

 private:
  struct State;
  class MeasuredStore;

  std::shared_ptr<State> state() const;
  static void run(const std::shared_ptr<State>& state);
  static bool work(const std::shared_ptr<State>& state, std::unique_ptr<Store>& store);
  static void listen(const std::shared_ptr<State>& state);
  static void start(const std::shared_ptr<State>& state);

  mutable std::mutex mutex_;  // guards `state_`
  std::shared_ptr<State> state_;
  std::shared_ptr<State> next_;    // of find_host(), until meet()
  std::shared_ptr<State> before_;  // of the start through the store; it keeps table() valid
};

}  // namespace ddpx::health
