#include "channel_threads.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "activity.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kTimeToAnswerNs = 300'000'000;  // usually much less
constexpr int64_t kLostNs = 2'000'000'000;
constexpr int64_t kCatchUpNs = 1'000'000'000;     // others write, and then this rank reads
constexpr int64_t kStateIsOldNs = 1'000'000'000;  // the watchdog writes it five times a second
constexpr auto kBeforeReconnecting = milliseconds(500);
constexpr int64_t kBetweenEventsNs = 500'000'000;

}  // namespace

struct ChannelThreads::State {
  std::shared_ptr<HostChannel> channel;
  StoreAccess access;
  int64_t lease_ns = 0;

  std::atomic<int64_t> asked_ns{0};  // since when the store has not answered; 0: it has
  std::atomic<int64_t> late_ns{0};   // when it last answered late
  std::atomic<int64_t> awake_ns{0};
  std::atomic<bool> broken{false};
  std::atomic<bool> ended{false};
  std::atomic<bool> stopped{false};
  std::atomic<bool> running{false};
  std::atomic<bool> listening{false};

  std::mutex mutex;  // guards the following
  std::condition_variable changed;
  std::optional<std::string> failure;  // to be posted
  bool leaving = false;                // to be posted
  bool hurried = false;

  // Measures a request. After an error, the time goes on until the next answer.
  template <class Request>
  auto ask(const Request& request) {
    int64_t none = 0;
    asked_ns.compare_exchange_strong(none, now_ns());
    auto answer = request();
    const auto now = now_ns();
    if (now - asked_ns > kTimeToAnswerNs) {
      late_ns = now;  // before `asked_ns`: the store must not seem well in between
    }
    broken = false;
    asked_ns = 0;
    return answer;
  }

  // Asks twice: a machine that goes down may refuse connections for a moment before.
  bool server_has_ended() const {
    if (!access.server_ended()) {
      return false;
    }
    std::this_thread::sleep_for(kBeforeReconnecting);
    return access.server_ended();
  }

  // Ends the thread, unless there is something to post.
  bool end() {
    const std::lock_guard<std::mutex> lock(mutex);
    running = failure || leaving;
    return !running;
  }

  void post(Store& store) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto text = failure;
    const bool leaves = leaving;
    lock.unlock();
    if (text) {
      channel->post_failure(store, *text);
    }
    if (leaves) {
      channel->leave(store);
      stopped = true;
    }
    lock.lock();
    failure = text ? std::nullopt : failure;
    leaving = leaving && !leaves;
    changed.notify_all();
  }

  // Of the thread that listens.
  void pause() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(
        lock, std::chrono::nanoseconds(kBetweenEventsNs), [this] { return stopped || !running; });
  }

  void wait_until(int64_t due_ns) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto time = std::chrono::nanoseconds(std::max<int64_t>(0, due_ns - now_ns()));
    changed.wait_for(lock, time, [this] { return stopped || failure || leaving || hurried; });
    hurried = false;
  }

  void hurry() {
    const std::lock_guard<std::mutex> lock(mutex);
    hurried = true;
    changed.notify_all();
  }

  StoreState store_state() const {
    const auto now = now_ns();
    const int64_t asked = asked_ns;
    const auto overdue = asked != 0 ? now - std::max<int64_t>(asked, awake_ns) : 0;
    if (ended) {
      return StoreState::kEnded;
    }
    if (overdue > lease_ns) {
      return StoreState::kSilent;
    }
    if (broken || overdue > kLostNs) {
      return StoreState::kLost;
    }
    if (overdue > kTimeToAnswerNs) {
      return StoreState::kOverdue;
    }
    return late_ns != 0 && now - late_ns < kCatchUpNs ? StoreState::kLate : StoreState::kAnswers;
  }
};

// Measures each request.
class ChannelThreads::MeasuredStore final : public Store {
 public:
  explicit MeasuredStore(State& state)
      : state_(state), store_(state.ask([&] { return state.access.connect(); })) {}

  void set(const std::string& key, const std::string& text) override {
    state_.ask([&] { return store_->set(key, text), true; });
  }
  std::optional<std::string> get(const std::string& key) override {
    return state_.ask([&] { return store_->get(key); });
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    return state_.ask([&] { return store_->set_first(key, text); });
  }
  void append(const std::string& key, const std::string& text) override {
    state_.ask([&] { return store_->append(key, text), true; });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return state_.ask([&] { return store_->add(key, value); });
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) override {
    return state_.ask([&] { return store_->multi_get(keys); });
  }

 private:
  State& state_;
  const std::unique_ptr<Store> store_;
};

ChannelThreads::ChannelThreads(
    std::shared_ptr<HostChannel> channel, StoreAccess access, int64_t lease_ns)
    : state_(std::make_shared<State>()) {
  state_->channel = std::move(channel);
  state_->access = std::move(access);
  state_->lease_ns = lease_ns;
}

ChannelThreads::~ChannelThreads() {
  state_->stopped = true;
  state_->hurry();
}

void ChannelThreads::start() {
  start_if_stopped();
}

void ChannelThreads::start_if_stopped() {
  if (!state_->running.exchange(true)) {
    std::thread(run, state_).detach();
  }
}

void ChannelThreads::run(const std::shared_ptr<State>& state) {
  auto& channel = *state->channel;
  std::unique_ptr<Store> store;
  while (true) {
    try {
      if (state->ended) {
        break;
      }
      if (state->stopped && state->end()) {
        return;
      }
      if (!store) {
        store = std::make_unique<MeasuredStore>(*state);
      }
      if (channel.table() == nullptr) {
        channel.introduce(*store);
      }
      state->post(*store);
      int64_t due_ns = HostChannel::kNever;
      if (!state->stopped && channel.should_keep()) {
        due_ns = channel.step(*store);
      }
      if (due_ns == HostChannel::kNever) {
        if (state->end()) {
          return;
        }
        continue;
      }
      const bool many = channel.table()->stage == HostTable::Stage::kManyHosts;
      if (many && !state->listening.exchange(true)) {
        std::thread(listen, state).detach();
      }
      state->wait_until(due_ns);
    } catch (const std::exception&) {
      state->broken = true;
      store.reset();
      if (state->server_has_ended()) {
        state->ended = true;
      }
      if (state->stopped) {
        break;
      }
      state->wait_until(now_ns() + std::chrono::nanoseconds(kBeforeReconnecting).count());
    }
  }
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->running = false;
  state->changed.notify_all();
}

void ChannelThreads::listen(const std::shared_ptr<State>& state) {
  auto& channel = *state->channel;
  std::unique_ptr<Store> store;
  while (!state->stopped && state->running && !channel.failure_heard()) {
    try {
      if (!store) {
        store = state->access.connect();
      }
      if (channel.listen(*store)) {
        state->hurry();
      }
      state->pause();
    } catch (const std::exception&) {
      store.reset();
      if (state->server_has_ended()) {
        state->ended = true;
        state->hurry();
        break;
      }
      std::this_thread::sleep_for(kBeforeReconnecting);
    }
  }
  state->listening = false;
}

void ChannelThreads::look(int64_t awake_ns) {
  auto& state = *state_;
  state.awake_ns = awake_ns;
  auto* table = state.channel->table();
  if (table == nullptr) {
    return;
  }
  if (state.running || state.ended) {
    table->store_state = static_cast<uint32_t>(state.store_state());
    table->store_state_ns = now_ns();
    if (now_ns() < table->wanted_until_ns || table->declared()) {
      state.hurry();
    }
  } else if (
      table->store_state != static_cast<uint32_t>(StoreState::kEnded) && !table->failure_posted &&
      state.channel->should_keep()) {
    start_if_stopped();
  }
}

void ChannelThreads::post_failure(const std::string& text) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->ended || state_->failure) {
      return;
    }
    state_->failure = text;
    state_->changed.notify_all();
  }
  start_if_stopped();
}

void ChannelThreads::leave() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->leaving = !state_->ended;
    state_->changed.notify_all();
  }
  start_if_stopped();
}

bool ChannelThreads::flush(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_until(
      lock, deadline, [this] { return (!state_->failure && !state_->leaving) || state_->ended; });
}

StoreState ChannelThreads::store_state() const {
  const auto* table = state_->channel->table();
  if (state_->running || state_->ended || table == nullptr) {
    return state_->store_state();
  }
  if (table->stage == HostTable::Stage::kOneHost) {
    return StoreState::kAnswers;
  }
  const auto state = table->store_state.load();
  const bool is_known = now_ns() - table->store_state_ns < kStateIsOldNs &&
                        state <= static_cast<uint32_t>(StoreState::kEnded);
  return is_known ? static_cast<StoreState>(state) : StoreState::kOverdue;
}

}  // namespace ddpx::health
