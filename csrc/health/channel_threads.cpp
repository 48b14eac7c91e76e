#include "channel_threads.h"

#include <algorithm>
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

// Until then, ranks that construct a wrapper usually have met in its collective call. The call
// takes longer where many ranks share few cores.
int64_t time_to_meet_ns(int world_size) {
  return std::min<int64_t>(100 + 10 * int64_t{world_size}, 1000) * 1'000'000;
}

}  // namespace

struct ChannelThreads::State {
  State(HostChannel::Settings settings, std::shared_ptr<HostProbe> probe, StoreAccess access)
      : settings(settings),
        probe(probe),
        access(std::move(access)),
        channel(std::move(settings), std::move(probe), now_ns) {}

  const HostChannel::Settings settings;
  const std::shared_ptr<HostProbe> probe;
  const StoreAccess access;
  HostChannel channel;
  const int64_t made_ns = now_ns();

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

  // Ends the thread, unless there is something to post. Returns whether it ends.
  bool end() {
    const std::lock_guard<std::mutex> lock(mutex);
    running = failure || leaving;
    return !running;
  }

  bool give_up() {
    const std::lock_guard<std::mutex> lock(mutex);
    running = false;
    changed.notify_all();
    return false;
  }

  void post(Store& store) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto text = failure;
    const bool leaves = leaving;
    lock.unlock();
    if (text) {
      channel.post_failure(store, *text);
    }
    if (leaves) {
      channel.leave(store);
      stopped = true;
    }
    lock.lock();
    failure = text ? std::nullopt : failure;
    leaving = leaving && !leaves;
    changed.notify_all();
  }

  void wait_until(int64_t due_ns) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto time = std::chrono::nanoseconds(std::max<int64_t>(0, due_ns - now_ns()));
    changed.wait_for(lock, time, [this] { return stopped || failure || leaving || hurried; });
    hurried = false;
  }

  void stop() {
    stopped = true;
    hurry();
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
    if (overdue > settings.lease_ns) {
      return StoreState::kSilent;
    }
    if (broken || overdue > kLostNs) {
      return StoreState::kLost;
    }
    const bool was_late = late_ns != 0 && now - late_ns < kCatchUpNs;
    return was_late || overdue > kTimeToAnswerNs ? StoreState::kSlow : StoreState::kAnswers;
  }
};

// Measures each request.
class ChannelThreads::MeasuredStore final : public Store {
 public:
  explicit MeasuredStore(State& state)
      : state_(state), store_(state.ask([&] { return state.access.connect(); })) {}

  void set(const std::vector<std::string>& keys, const std::string& text) override {
    state_.ask([&] { return store_->set(keys, text), true; });
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
  void await(const std::string& key) override {  // for as long as nothing happens
    store_->await(key);
  }

 private:
  State& state_;
  const std::unique_ptr<Store> store_;
};

ChannelThreads::ChannelThreads(
    HostChannel::Settings settings, std::shared_ptr<HostProbe> probe, StoreAccess access)
    : state_(std::make_shared<State>(std::move(settings), std::move(probe), std::move(access))) {}

ChannelThreads::~ChannelThreads() {
  state()->stop();
}

std::shared_ptr<ChannelThreads::State> ChannelThreads::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

// ---- the start ----------------------------------------------------------------------------------

uint64_t ChannelThreads::find_host(const std::vector<Introduction>& ranks) {
  const auto state = this->state();
  next_ = std::make_shared<State>(state->settings, state->probe, state->access);
  return next_->channel.find_host(ranks);
}

void ChannelThreads::meet(const std::vector<uint64_t>& hosts) {
  next_->channel.meet(hosts);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    before_ = std::exchange(state_, next_);
  }
  before_->stop();
  const auto table = before_->channel.table();
  if (const auto failure = table ? table->declared() : std::nullopt) {
    this->table()->declare(next_->settings.own.rank, *failure, now_ns());
  }
}

void ChannelThreads::introduce() {
  if (const auto state = this->state(); !state->channel.table()) {
    start(state);
  }
}

HostTable* ChannelThreads::table() const {
  return shared_table().get();
}

std::shared_ptr<HostTable> ChannelThreads::shared_table() const {
  return state()->channel.table();
}

// ---- the threads --------------------------------------------------------------------------------

void ChannelThreads::start(const std::shared_ptr<State>& state) {
  if (!state->running.exchange(true)) {
    std::thread(run, state).detach();
  }
}

void ChannelThreads::run(const std::shared_ptr<State>& state) {
  std::unique_ptr<Store> store;
  bool at_work = true;
  while (at_work) {
    try {
      at_work = state->ended ? state->give_up() : work(state, store);
    } catch (const std::exception&) {
      state->broken = true;
      store.reset();
      state->ended = state->ended || state->server_has_ended();
      if (state->stopped) {
        at_work = state->give_up();
      } else if (!state->ended) {
        state->wait_until(now_ns() + std::chrono::nanoseconds(kBeforeReconnecting).count());
      }
    }
  }
  try {
    if (state->listening && store) {
      store->set({state->channel.wake_key()}, "wake");  // the other thread ends, too
    }
  } catch (const std::exception&) {  // its connection is broken, too
  }
}

// Returns whether there is more to do.
bool ChannelThreads::work(const std::shared_ptr<State>& state, std::unique_ptr<Store>& store) {
  auto& channel = state->channel;
  if (state->stopped && state->end()) {
    return false;
  }
  if (!store) {
    store = std::make_unique<MeasuredStore>(*state);
  }
  if (!channel.table()) {
    channel.introduce(*store);
  }
  state->post(*store);
  const bool keeps = !state->stopped && channel.should_keep();
  const auto due_ns = keeps ? channel.step(*store) : HostChannel::kNever;
  if (due_ns == HostChannel::kNever) {
    return !state->end();
  }
  if (channel.table()->stage == HostTable::Stage::kManyHosts && !state->listening.exchange(true)) {
    std::thread(listen, state).detach();
  }
  state->wait_until(due_ns);
  return true;
}

void ChannelThreads::listen(const std::shared_ptr<State>& state) {
  auto& channel = state->channel;
  std::unique_ptr<Store> store;
  while (!state->stopped && state->running && !channel.failure_heard()) {
    try {
      if (!store) {
        store = state->access.connect();
      }
      if (channel.listen(*store)) {
        state->hurry();
      } else {
        store->await(channel.wake_key());
      }
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
  const auto state = this->state();
  state->awake_ns = awake_ns;
  const auto table = state->channel.table();
  if (!table) {
    if (now_ns() - state->made_ns > time_to_meet_ns(state->settings.world_size)) {
      start(state);
    }
  } else if (state->running || state->ended) {
    table->store_state = static_cast<uint32_t>(state->store_state());
    table->store_state_ns = now_ns();
    if (now_ns() < table->wanted_until_ns || table->declared()) {
      state->hurry();
    }
  } else if (
      table->store_state != static_cast<uint32_t>(StoreState::kEnded) && !table->failure_posted &&
      state->channel.should_keep()) {
    start(state);
  }
}

void ChannelThreads::post_failure(const std::string& text) {
  const auto state = this->state();
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (state->ended || state->failure) {
      return;
    }
    state->failure = text;
    state->changed.notify_all();
  }
  start(state);
}

void ChannelThreads::leave() {
  const auto state = this->state();
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->leaving = !state->ended;
    state->changed.notify_all();
  }
  start(state);
}

bool ChannelThreads::flush(std::chrono::steady_clock::time_point deadline) {
  const auto state = this->state();
  std::unique_lock<std::mutex> lock(state->mutex);
  return state->changed.wait_until(
      lock, deadline, [&state] { return (!state->failure && !state->leaving) || state->ended; });
}

StoreState ChannelThreads::store_state() const {
  const auto state = this->state();
  const auto table = state->channel.table();
  if (state->running || state->ended || !table) {
    return state->store_state();
  }
  if (table->stage == HostTable::Stage::kOneHost) {
    return StoreState::kAnswers;
  }
  const auto seen = table->store_state.load();
  const bool is_known = now_ns() - table->store_state_ns < kStateIsOldNs &&
                        seen <= static_cast<uint32_t>(StoreState::kEnded);
  return is_known ? static_cast<StoreState>(seen) : StoreState::kSlow;
}

}  // namespace ddpx::health
