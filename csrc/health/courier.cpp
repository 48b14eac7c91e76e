#include "courier.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace ddpx::health {
namespace {

constexpr auto kFirstRounds = std::chrono::milliseconds(20);
constexpr auto kBetweenRounds = std::chrono::milliseconds(500);
constexpr int kNumFirstRounds = 100;

constexpr int64_t kTimeToAnswerNs = 300'000'000;  // a store that is well takes less
constexpr int64_t kLostNs = 2'000'000'000;
constexpr int64_t kCatchUpNs = 1'000'000'000;  // two rounds: others tell, then this one asks

constexpr const char* kFailureKey = "ddpx/health/failure";

std::string introduction_key(int rank) {
  return "ddpx/health/introduction/" + std::to_string(rank);
}

std::string beat_key(int rank) {
  return "ddpx/health/beat/" + std::to_string(rank);
}

std::string calls_key(int rank) {
  return "ddpx/health/calls/" + std::to_string(rank);
}

}  // namespace

struct Courier::State {
  std::unique_ptr<Board> board;  // the thread's
  std::function<bool()> find_server_ended;
  enum class Server { kNotLookedFor, kLookedFor, kEnded };
  std::atomic<Server> server{Server::kNotLookedFor};
  int rank;
  Introduction own;
  Duties duties;
  std::string told_calls;            // the thread's, too
  std::atomic<int64_t> asked_ns{0};  // when the call to the store began that has not returned
  std::atomic<int64_t> late_ns{0};   // when it last gave a late answer
  std::atomic<bool> lost{false};

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::set<int> unknown;
  std::optional<std::string> to_post;
  bool hurried = false;
  bool stopped = false;
  bool running = true;

  // Calls `use(*board)`; the time that takes is the store's.
  template <class Use>
  auto ask(const Use& use) {
    const auto start = now_ns();
    asked_ns = start;
    auto answer = use(*board);
    const auto end = now_ns();
    if (end - start > kTimeToAnswerNs) {
      late_ns = end;  // first: in between the store would seem to be well
    }
    asked_ns = 0;
    return answer;
  }

  std::optional<std::string> get(const std::string& key) {
    return ask([&key](Board& board) { return board.get(key); });
  }

  void set(const std::string& key, const std::string& text) {
    ask([&](Board& board) { return board.set(key, text), true; });
  }

  void meet_unknown() {
    const auto others = unknown_now();
    std::vector<std::pair<int, Introduction>> found;
    for (const int other : others) {
      post();  // whose script ends has little time
      const auto text = get(introduction_key(other));
      if (auto introduction = text ? Introduction::from_text(*text) : std::nullopt) {
        found.emplace_back(other, std::move(*introduction));
      }
    }
    if (!others.empty()) {
      hear_failure();  // before they are met: who is gone has said why before that
    }
    for (const auto& [other, introduction] : found) {
      if (duties.meet(other, introduction)) {
        const std::lock_guard<std::mutex> lock(mutex);
        unknown.erase(other);
      }
    }
  }

  void hear_failure() {
    if (const auto failure = get(kFailureKey)) {
      duties.failed(*failure);
    }
  }

  std::set<int> unknown_now() {
    const std::lock_guard<std::mutex> lock(mutex);
    return unknown;
  }

  void post() {
    std::optional<std::string> failure;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = to_post;
    }
    if (failure) {
      ask([&](Board& board) { return board.set_first(kFailureKey, *failure); });
      const std::lock_guard<std::mutex> lock(mutex);
      to_post.reset();
      changed.notify_all();
    }
  }

  void exchange_beats() {
    const auto others = duties.far_ranks();
    if (others.empty()) {
      return;
    }
    set(beat_key(rank), duties.beat().to_text());
    hear_failure();
    if (!duties.curious()) {
      return;  // all asking about all would be too much for the store of a large job
    }
    for (const int other : others) {
      const auto text = get(beat_key(other));
      if (const auto beat = text ? Peer::Beat::from_text(*text) : std::nullopt) {
        duties.heard(other, *beat);
      }
    }
  }

  void exchange_calls() {
    const auto own = duties.calls_to_tell();
    if (!own) {
      return;
    }
    if (own->text != told_calls) {
      set(calls_key(rank), own->text);
      told_calls = own->text;
    }
    const auto theirs = get(calls_key(own->counterpart));
    if (const auto failure =
            theirs ? duties.compare_calls(own->counterpart, *theirs) : std::nullopt) {
      // Others may have found it, too: all use the words of the first.
      duties.failed(ask([&](Board& board) { return board.set_first(kFailureKey, *failure); }));
    }
  }

  bool is_needed() {
    return !duties.far_ranks().empty() || !unknown_now().empty() || !duties.met();
  }

  // Whether there is more to do.
  bool rest(int round) {
    const bool needed = is_needed();
    std::unique_lock<std::mutex> lock(mutex);
    if (!needed && !to_post) {
      return false;
    }
    const auto pause = round < kNumFirstRounds && !unknown.empty() ? kFirstRounds : kBetweenRounds;
    changed.wait_for(lock, pause, [this] { return stopped || to_post || hurried; });
    hurried = false;
    return !stopped;
  }
};

Courier::Courier(
    std::unique_ptr<Board> board, int rank, int world_size, const Introduction& own, Duties duties)
    : state_(std::make_shared<State>()) {
  state_->find_server_ended = board->server_ended();
  state_->board = std::move(board);
  state_->rank = rank;
  state_->own = own;
  state_->duties = std::move(duties);
  for (int other = 0; other < world_size; ++other) {
    if (other != rank) {
      state_->unknown.insert(other);
    }
  }
}

void Courier::start() {
  std::thread(work, state_).detach();
}

Courier::~Courier() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
}

void Courier::work(const std::shared_ptr<State>& state) {
  try {
    state->set(introduction_key(state->rank), state->own.to_text());
    for (int round = 0;; ++round) {
      state->post();
      state->meet_unknown();
      state->exchange_beats();
      state->exchange_calls();
      if (!state->rest(round)) {
        break;
      }
    }
  } catch (const std::exception&) {
    state->lost = true;
  }
  state->board.reset();
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->running = false;
  state->changed.notify_all();
}

bool Courier::is_needed() const {
  return state_->is_needed();
}

void Courier::post_failure(const std::string& failure) {
  const bool needed = is_needed();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->running && needed && !state_->to_post) {
    state_->to_post = failure;
    state_->changed.notify_all();
  }
}

bool Courier::flush(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_until(
      lock, deadline, [this] { return !state_->to_post || !state_->running; });
}

void Courier::hurry() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->hurried = true;
  state_->changed.notify_all();
}

StoreState Courier::store_state() const {
  const int64_t asked_ns = state_->asked_ns;
  const int64_t late_ns = state_->late_ns;
  const auto now = now_ns();
  const auto owed = asked_ns != 0 ? now - asked_ns : 0;
  if (state_->lost || owed > kLostNs) {
    return StoreState::kLost;
  }
  if (owed > kTimeToAnswerNs) {
    return StoreState::kOverdue;
  }
  const bool was_late = late_ns != 0 && now - late_ns < kCatchUpNs;
  return was_late ? StoreState::kLate : StoreState::kAnswers;
}

bool Courier::broken() const {
  return state_->lost;
}

bool Courier::server_ended() const {
  return state_->server == State::Server::kEnded;
}

void Courier::look_for_server() {
  using Server = State::Server;
  auto expected = Server::kNotLookedFor;
  if (state_->server.compare_exchange_strong(expected, Server::kLookedFor)) {
    std::thread([state = state_] {
      state->server = state->find_server_ended() ? Server::kEnded : Server::kNotLookedFor;
    }).detach();
  }
}

}  // namespace ddpx::health
