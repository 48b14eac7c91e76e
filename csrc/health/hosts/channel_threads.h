// The channel of one rank, and its threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>

#include "host_channel.h"
#include "store.h"

namespace ddpx::health {

// Owned by GroupState, and by its own threads, which may wait for the store for longer than
// GroupState lives. Thread-safe.
//
// One thread makes requests while requests are due. While this thread lives, another thread waits
// for events.
class ChannelThreads : public std::enable_shared_from_this<ChannelThreads> {
 public:
  ChannelThreads(
      HostChannel::Settings settings, std::shared_ptr<HostProbe> probe, StoreAccess access);

  HostChannel& channel() {
    return channel_;
  }
  // Null before the host of this rank is decided. Lives as long as this object.
  HostTable* table() const {
    return channel_.table().get();
  }

  // Starts through the store, unless ranks have met. check() does so after collective_start().
  void introduce();

  // For the watchdog. Starts the threads if requests are due, for example if the keeper of the host
  // does not renew the lease. `awake_ns`: since when this process has run without a stop.
  void check(int64_t awake_ns);

  void post_failure(const std::string& text);
  void leave(bool serves_store);

  // Waits until everything is posted. Returns false at `deadline_ns`.
  bool flush(int64_t deadline_ns);

  // The threads end once everything is posted.
  void stop();

  StoreState store_state() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Post = std::function<void(Store&)>;

  void add_post(Post post);
  void start();
  bool has_posts() const;
  bool works() const;
  bool goes_on(bool keeps);
  void run();
  std::unique_ptr<Store> connect();
  bool work(Store& store, std::stop_source& listening);
  bool post_all(Store& store);
  void listen(const std::stop_token& stop);
  void wait_until(int64_t due_ns);
  void hurry();

  HostChannel channel_;
  const StoreAccess access_;
  const int64_t made_ns_ = now_ns();
  AnswerTimes answers_;
  std::atomic<int64_t> awake_ns_{0};

  mutable std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  bool works_ = false;  // the thread for requests lives; it may have lost its connection
  std::deque<Post> posts_;
  bool stops_ = false;
  bool hurries_ = false;
};

}  // namespace ddpx::health
