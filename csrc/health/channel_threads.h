// The threads that drive a HostChannel.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "host_channel.h"

namespace ddpx::health {

// The store, as its answers show.
enum class StoreState : uint32_t {
  kAnswers,  // or no request is necessary
  kLate,     // it has just answered late: others may have been late to write, too
  kOverdue,  // a request has not been answered in time
  kLost,     // no answer for 2 s, or the connection broke
  kSilent,   // no answer for a lease
  kEnded,    // its port refuses connections: its process has ended
};

// Owned by the monitor. Only the threads of this class wait for the store. They are detached, and
// share the channel, since they may wait for longer than the monitor lives. Thread-safe.
class ChannelThreads {
 public:
  ChannelThreads(std::shared_ptr<HostChannel> channel, StoreAccess access, int64_t lease_ns);
  ~ChannelThreads();
  ChannelThreads(const ChannelThreads&) = delete;
  ChannelThreads& operator=(const ChannelThreads&) = delete;

  // Introduces this rank.
  void start();

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

  static void run(const std::shared_ptr<State>& state);
  static void listen(const std::shared_ptr<State>& state);
  void start_if_stopped();

  const std::shared_ptr<State> state_;
};

}  // namespace ddpx::health
