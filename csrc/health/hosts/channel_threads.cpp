#include "channel_threads.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "../../os/threads.h"

namespace ddpx::health {
namespace {

constexpr std::chrono::nanoseconds kReconnect(times::kReconnect);
constexpr std::chrono::nanoseconds kPostPoll(times::kPostPoll);

}  // namespace

ChannelThreads::ChannelThreads(
    HostChannel::Settings settings, std::shared_ptr<HostProbe> probe, StoreAccess access)
    : channel_(std::move(settings), std::move(probe), now_ns), access_(std::move(access)) {}

// ---- for the monitor ----------------------------------------------------------------------------

void ChannelThreads::introduce() {
  if (channel_.must_introduce()) {
    start();
  }
}

void ChannelThreads::check(int64_t awake_ns) {
  awake_ns_ = awake_ns;
  const bool must_introduce = channel_.must_introduce();
  auto* table = this->table();  // not null if this rank has introduced itself
  if (table != nullptr && works()) {
    table->store_state = static_cast<uint32_t>(store_state());
    table->store_state_ns = now_ns();
    if (now_ns() < table->wanted_until_ns || table->declared()) {
      hurry();
    }
  } else if (must_introduce) {
    if (now_ns() - made_ns_ > times::collective_start(channel_.settings().world_size)) {
      start();
    }
  } else if (channel_.should_keep()) {
    start();
  }
  if (has_posts()) {
    start();
  }
}

bool ChannelThreads::has_posts() const {
  const Lock lock(mutex_);
  return !posts_.empty();
}

void ChannelThreads::post_failure(const std::string& text) {
  add_post([this, text](Store& store) { channel_.post_failure(store, text); });
}

void ChannelThreads::leave(bool serves_store) {
  add_post([this, serves_store](Store& store) {
    channel_.leave(store, serves_store);
    stop();
  });
}

void ChannelThreads::add_post(Post post) {
  {
    const Lock lock(mutex_);
    posts_.push_back(std::move(post));
    changed_.notify_all();
  }
  start();
}

bool ChannelThreads::flush(int64_t deadline_ns) {
  Lock lock(mutex_);
  const auto can_post = [&] {
    return answers_.state(channel_.settings().lease_ns, awake_ns_) != StoreState::kEnded;
  };
  while (!posts_.empty() && can_post() && now_ns() < deadline_ns) {
    changed_.wait_for(lock, kPostPoll);
  }
  return posts_.empty();
}

void ChannelThreads::stop() {
  const Lock lock(mutex_);
  stops_ = true;
  changed_.notify_all();
}

StoreState ChannelThreads::store_state() const {
  const auto* table = this->table();
  const bool asks = works() || table == nullptr;
  const auto own = answers_.state(channel_.settings().lease_ns, awake_ns_);
  if (asks && (answers_.any() || table == nullptr)) {
    return own;
  }
  if (!asks && table->stage == HostTable::Stage::kOneHost) {
    return StoreState::kAnswers;
  }
  // The state that the keeper publishes. A rank that takes over uses it until the first answer.
  const auto seen = table->store_state.load();
  const bool is_known = now_ns() - table->store_state_ns < times::kStateIsOld &&
                        seen <= static_cast<uint32_t>(StoreState::kEnded);
  if (asks) {
    return is_known ? std::max(own, static_cast<StoreState>(seen)) : own;
  }
  return is_known ? static_cast<StoreState>(seen) : StoreState::kSlow;
}

// ---- the thread for requests --------------------------------------------------------------------

bool ChannelThreads::works() const {
  const Lock lock(mutex_);
  return works_;
}

void ChannelThreads::start() {
  const Lock lock(mutex_);
  if (!works_) {  // where no thread can start, check() tries again
    works_ = os::start_thread([self = shared_from_this()] { self->run(); });
  }
}

// `keeps`: this rank keeps the lease.
bool ChannelThreads::goes_on(bool keeps) {
  const Lock lock(mutex_);
  works_ = keeps || !posts_.empty();
  return works_;
}

std::unique_ptr<Store> ChannelThreads::connect() {
  try {
    return access_();
  } catch (const StoreEnded&) {
    answers_.mark_ended();
    throw;
  }
}

void ChannelThreads::run() {
  std::unique_ptr<Store> store;
  auto listening = std::stop_source(std::nostopstate);
  bool keeps = true;
  while (goes_on(keeps)) {
    try {
      if (!store) {
        auto connection = answers_.ask([this] { return connect(); });
        if (!connection) {  // the group was destroyed
          keeps = false;
          const Lock lock(mutex_);
          posts_.clear();
          continue;
        }
        store = std::make_unique<MeasuredStore>(std::move(connection), answers_);
      }
      keeps = work(*store, listening);
      if (!keeps && listening.stop_possible()) {
        listening.request_stop();
        store->set({channel_.wake_key()}, "wake");
        listening = std::stop_source(std::nostopstate);
      }
    } catch (const std::exception&) {
      store.reset();
      Lock lock(mutex_);
      changed_.wait_for(lock, kReconnect, [this] { return stops_; });
      keeps = !stops_;
      if (stops_) {
        posts_.clear();  // no thread waits for them
      }
    }
  }
  listening.request_stop();
}

// Returns whether this rank keeps the lease.
bool ChannelThreads::work(Store& store, std::stop_source& listening) {
  if (channel_.must_introduce()) {
    channel_.introduce(store);
  }
  const bool stops = post_all(store);
  if (stops || !channel_.should_keep()) {
    return false;
  }
  const auto due_ns = channel_.step(store);
  if (due_ns == HostChannel::kNever) {
    return false;
  }
  const bool listens = listening.stop_possible() && !listening.stop_requested();
  if (table()->stage == HostTable::Stage::kManyHosts && !listens) {
    std::stop_source source;
    const auto listen = [self = shared_from_this(), stop = source.get_token()] {
      self->listen(stop);
    };
    if (os::start_thread(listen)) {
      listening = source;
    }
  }
  wait_until(due_ns);
  return true;
}

// Returns whether the threads stop.
bool ChannelThreads::post_all(Store& store) {
  Lock lock(mutex_);
  while (!posts_.empty()) {
    const auto post = posts_.front();
    lock.unlock();
    post(store);
    lock.lock();
    posts_.pop_front();
    changed_.notify_all();
  }
  return stops_;
}

void ChannelThreads::wait_until(int64_t due_ns) {
  Lock lock(mutex_);
  const auto time = std::chrono::nanoseconds(std::max<int64_t>(0, due_ns - now_ns()));
  changed_.wait_for(lock, time, [this] { return hurries_ || stops_ || !posts_.empty(); });
  hurries_ = false;
}

void ChannelThreads::hurry() {
  const Lock lock(mutex_);
  hurries_ = true;
  changed_.notify_all();
}

// ---- the thread for events ----------------------------------------------------------------------

void ChannelThreads::listen(const std::stop_token& stop) {
  std::unique_ptr<Store> store;
  while (!stop.stop_requested() && !table()->failure_posted) {
    try {
      if (!store) {
        store = connect();
        if (!store) {
          return;  // the group was destroyed
        }
      }
      if (channel_.listen(*store)) {
        hurry();
      } else {
        store->await(channel_.wake_key());
      }
    } catch (const std::exception&) {
      if (!store) {
        std::this_thread::sleep_for(kReconnect);
      }
      store.reset();
    }
  }
}

}  // namespace ddpx::health
