// The store of a process group: texts by key that all ranks can read and write.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../machine/clock.h"

namespace ddpx::health {

// One connection to the store. Owned by the thread that calls it. A call may block, and throws if
// the connection is lost.
class Store {
 public:
  virtual ~Store() = default;

  // Sets all keys to the same text.
  virtual void set(const std::vector<std::string>& keys, const std::string& text) = 0;

  // nullopt if the key does not exist. Does not wait for the key.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  // Sets a key that does not exist. Returns the key's text afterwards.
  virtual std::string set_first(const std::string& key, const std::string& text) = 0;

  virtual void append(const std::string& key, const std::string& text) = 0;

  // Returns the sum. A key that does not exist counts as 0.
  virtual int64_t add(const std::string& key, int64_t value) = 0;

  // All keys must exist.
  virtual std::vector<std::string> multi_get(const std::vector<std::string>& keys) = 0;

  // Waits until the key exists, and deletes it. Ends only with the key, or with the connection.
  virtual void await(const std::string& key) = 0;
};

// The process that served the store has ended.
struct StoreEnded : std::runtime_error {
  StoreEnded() : std::runtime_error("the process of the store has ended") {}
};

// Opens a connection. May block for some seconds, and throws if the store cannot be reached.
// Returns null if the process group was destroyed.
using StoreAccess = std::function<std::unique_ptr<Store>()>;

// ---- how fast the store answers -----------------------------------------------------------------

// The state of the store, measured by its answers. A later state is worse.
enum class StoreState : uint32_t {
  kAnswers,  // or no request is necessary
  kSlow,     // an answer is late, or was late: messages of other hosts may be late, too
  kLost,  // an answer takes 2 s longer than the last answer (at most 3 s), or the connection broke
  kSilent,  // no answer for a lease
  kEnded,   // the process that serves the store has ended
};

// The answers to the thread for requests. Thread-safe.
class AnswerTimes {
 public:
  // Measures a request. After an error, the time goes on until the next answer.
  template <class Request>
  auto ask(const Request& request) {
    int64_t none = 0;
    asked_ns_.compare_exchange_strong(none, now_ns());
    try {
      auto answer = request();
      const auto now = now_ns();
      const auto took_ns = now - asked_ns_;
      late_ns_ = took_ns > times::kLateAnswer ? now : late_ns_.load();
      took_ns_ = std::min(took_ns, times::kSlowestAnswer);
      is_broken_ = false;
      ended_ns_ = 0;
      any_ = true;
      asked_ns_ = 0;  // last: the state must not be kAnswers before the other members are set
      return answer;
    } catch (...) {
      is_broken_ = true;
      throw;
    }
  }

  // The store has refused a connection.
  void mark_ended() {
    int64_t none = 0;
    ended_ns_.compare_exchange_strong(none, now_ns());
  }

  // Whether the store has answered at least once.
  bool any() const {
    return any_;
  }

  // `awake_ns`: since when this process has not been stopped.
  StoreState state(int64_t lease_ns, int64_t awake_ns) const {
    const auto now = now_ns();
    const int64_t asked = asked_ns_;
    const auto overdue = asked != 0 ? now - std::max(asked, awake_ns) : 0;
    const bool was_late = late_ns_ != 0 && now - late_ns_ < times::kCatchUp;
    const bool has_ended = ended_ns_ != 0 && now - ended_ns_ > times::kRefusal;
    return has_ended                                             ? StoreState::kEnded
           : overdue > lease_ns                                  ? StoreState::kSilent
           : is_broken_ || overdue > times::kNoAnswer + took_ns_ ? StoreState::kLost
           : was_late || overdue > times::kLateAnswer            ? StoreState::kSlow
                                                                 : StoreState::kAnswers;
  }

 private:
  std::atomic<int64_t> asked_ns_{0};  // the start of the first request without an answer, or 0
  std::atomic<int64_t> took_ns_{0};   // the time of the last answer
  std::atomic<int64_t> late_ns_{0};   // when the last late answer arrived
  std::atomic<bool> is_broken_{false};
  std::atomic<int64_t> ended_ns_{0};  // since when the store has refused connections, or 0
  std::atomic<bool> any_{false};
};

// A connection whose requests are measured.
class MeasuredStore final : public Store {
 public:
  MeasuredStore(std::unique_ptr<Store> store, AnswerTimes& times)
      : times_(times), store_(std::move(store)) {}

  void set(const std::vector<std::string>& keys, const std::string& text) override {
    times_.ask([&] { return store_->set(keys, text), true; });
  }
  std::optional<std::string> get(const std::string& key) override {
    return times_.ask([&] { return store_->get(key); });
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    return times_.ask([&] { return store_->set_first(key, text); });
  }
  void append(const std::string& key, const std::string& text) override {
    times_.ask([&] { return store_->append(key, text), true; });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return times_.ask([&] { return store_->add(key, value); });
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) override {
    return times_.ask([&] { return store_->multi_get(keys); });
  }
  void await(const std::string& key) override {  // not measured: ends with an event
    store_->await(key);
  }

 private:
  AnswerTimes& times_;
  const std::unique_ptr<Store> store_;
};

// ---- the keys of a channel between hosts --------------------------------------------------------

// The start through the store: a list of the ranks with their hosts, and their number.
inline constexpr const char* kRanks = "ddpx/health/ranks";
inline constexpr const char* kCount = "ddpx/health/count";

// The introduction of a rank of this machine whose page may become the page of a host. The keys
// have numbers without gaps, so all ranks of a machine try them in the same order.
inline std::string candidate_key(const std::string& machine, int number) {
  return "ddpx/health/machine/" + machine + "/" + std::to_string(number);
}

// The hosts that have written a message.
inline constexpr const char* kHosts = "ddpx/health/hosts";

// The last message of a host.
inline std::string host_key(uint64_t token) {
  return "ddpx/health/host/" + std::to_string(token);
}

// Events have numbers without gaps. The first text for a number stays, so all hosts have the same
// order of events.
inline std::string event_key(uint32_t number) {
  return "ddpx/health/event/" + std::to_string(number);
}

// Wakes the keeper of a host after an event.
inline std::string wake_key_of(uint64_t token) {
  return "ddpx/health/wake/" + std::to_string(token);
}

}  // namespace ddpx::health
