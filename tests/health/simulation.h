// A simulation of the hosts of a large job, with a virtual clock. It runs the shipped HostChannel.
// The clock, the store and the processes are simulated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "health/hosts/host_channel.h"
#include "health/machine/record.h"

namespace ddpx::health {

using times::kMillisecond;
using times::kSecond;

struct SimulationSettings {
  int num_ranks = 8;
  int ranks_per_host = 8;
  int64_t latency_ns = kMillisecond;     // of a request to the store and its answer
  double capacity = 50'000;              // requests that the store answers in a second
  int64_t jitter_ns = 2 * kMillisecond;  // mean delay of a thread
  double hiccups_per_hour = 0;           // of each host: the store, or a keeper, stops for seconds
  int64_t look_ns = 200 * kMillisecond;  // between two looks of a watchdog
  bool through_store = false;            // ranks do not meet in a collective call
  int dropped_host = -1;                 // the seeded defect: the store keeps its first message
};

class Simulation {
 public:
  explicit Simulation(SimulationSettings settings);
  Simulation(Simulation&&) = delete;  // its parts refer to it

  // Runs until the virtual time `until_ns`.
  void run(int64_t until_ns);
  int64_t now() const {
    return now_ns_;
  }
  int64_t num_requests() const {
    return num_requests_;
  }
  int num_hosts() const {
    return static_cast<int>(hosts_.size());
  }
  void set_latency(int64_t latency_ns) {
    settings_.latency_ns = latency_ns;
  }

  void kill_rank(int rank);
  void lose_host(int host);
  void stop_rank(int rank, int64_t time_ns) {
    ranks_[static_cast<std::size_t>(rank)].stopped_until_ns = now_ns_ + time_ns;
  }
  // Ranks of all hosts but the last one wait for a rank of that host.
  void stall(bool stalled) {
    stalled_ = stalled;
  }

  // When the last host knew that all ranks of the group are known; nullopt before.
  std::optional<int64_t> started_ns() const;
  // When the last rank of a host that is left knew of a failure; nullopt before.
  std::optional<int64_t> reported_ns() const;
  // The ranks that a host reports as lost.
  std::vector<int> reported(int host) const;
  // Whether a host reports ranks that live.
  bool reports_falsely() const;

 private:
  class Connection;
  class Probe;
  struct Rank {
    std::shared_ptr<HostTable> own_table;
    std::unique_ptr<HostChannel> channel;
    std::unique_ptr<Store> store;
    int64_t local_ns = 0;  // the time of the thread that talks to the store
    int64_t busy_until_ns = 0;
    int64_t stopped_until_ns = 0;
    bool keeps = false;
    bool dead = false;
  };

  int host_of(int rank) const {
    return rank / settings_.ranks_per_host;
  }
  HostTable* table_of(int host) const;
  void meet();
  void wake(const std::string& key, int64_t time_ns);
  void at(int64_t time_ns, std::function<void()> event) {
    events_.push({time_ns, num_events_++, std::move(event)});
  }
  // Keeps the time at which a host has a failure for the first time.
  void note_failure(int host, int64_t time_ns);
  // Runs `work` as the thread of a rank, and returns the thread's time afterwards.
  int64_t run_thread(int rank, const std::function<void(Store&)>& work);
  void keep(int rank);
  int64_t step(int rank);
  void look(int rank);
  void listen(int rank);
  int64_t delay();

  struct Event {
    int64_t time_ns;
    int64_t order;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return std::pair(time_ns, order) > std::pair(other.time_ns, other.order);
    }
  };

  SimulationSettings settings_;
  int64_t now_ns_ = kSecond;
  int64_t num_events_ = 0;
  std::priority_queue<Event> events_;
  std::mt19937_64 random_{7};
  std::vector<Rank> ranks_;
  std::vector<Introduction> introductions_;
  std::vector<int> hosts_;            // the first rank of each
  std::vector<int64_t> declared_ns_;  // by host, when it first had a failure; 0: it has none
  std::unordered_map<std::string, std::string> texts_;
  std::unordered_map<std::string, std::vector<int>> listeners_;  // ranks by their keys
  int64_t num_requests_ = 0;
  double backlog_ = 0;  // requests that the store has not answered yet
  int64_t backlog_ns_ = 0;
  int64_t store_stopped_until_ns_ = 0;
  bool stalled_ = false;
};

// ---- substitutes --------------------------------------------------------------------------------

class Simulation::Connection final : public Store {
 public:
  Connection(Simulation& simulation, int rank) : simulation_(simulation), rank_(rank) {}

  void set(const std::vector<std::string>& keys, const std::string& text) override {
    request();
    for (const auto& key : keys) {
      const bool is_new = texts().try_emplace(key, text).second;
      if (!is_new && simulation_.host_of(rank_) != simulation_.settings_.dropped_host) {
        texts()[key] = text;
      }
      simulation_.wake(key, local());
    }
  }
  std::optional<std::string> get(const std::string& key) override {
    request();
    const auto found = texts().find(key);
    return found == texts().end() ? std::nullopt : std::make_optional(found->second);
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    request();
    const auto found = texts().try_emplace(key, text).first;
    return found->second;
  }
  void append(const std::string& key, const std::string& text) override {
    request();
    texts()[key] += text;
  }
  int64_t add(const std::string& key, int64_t value) override {
    request();
    const auto sum = std::atoll(texts()[key].c_str()) + value;
    texts()[key] = std::to_string(sum);
    return sum;
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) override {
    request();
    request();  // c10d's store first waits for the keys
    std::vector<std::string> found;
    for (const auto& key : keys) {
      found.push_back(texts().at(key));
    }
    return found;
  }
  void await(const std::string&) override {}  // see Simulation::wake

 private:
  std::unordered_map<std::string, std::string>& texts() {
    return simulation_.texts_;
  }
  int64_t& local() {
    return simulation_.ranks_[static_cast<std::size_t>(rank_)].local_ns;
  }
  void request() {
    auto& simulation = simulation_;
    const auto capacity = simulation.settings_.capacity;
    const auto passed = static_cast<double>(simulation.now_ns_ - simulation.backlog_ns_) / 1e9;
    simulation.backlog_ = std::max(0.0, simulation.backlog_ - passed * capacity) + 1;
    simulation.backlog_ns_ = simulation.now_ns_;
    ++simulation.num_requests_;
    local() = std::max(local(), simulation.store_stopped_until_ns_);
    local() += simulation.settings_.latency_ns +
               static_cast<int64_t>(simulation.backlog_ / capacity * 1e9);
  }

  Simulation& simulation_;
  const int rank_;
};

class Simulation::Probe final : public HostProbe {
 public:
  Probe(Simulation& simulation, int rank) : simulation_(simulation), rank_(rank) {}

  std::shared_ptr<HostTable> open(const Introduction& who) override {
    auto& rank = simulation_.ranks_[static_cast<std::size_t>(who.rank)];
    if (rank.dead || simulation_.host_of(who.rank) != simulation_.host_of(rank_)) {
      return nullptr;
    }
    if (!rank.own_table) {
      auto* memory = std::calloc(1, HostTable::num_bytes(simulation_.settings_.num_ranks));
      rank.own_table = {static_cast<HostTable*>(memory), std::free};
    }
    return rank.own_table;
  }
  bool lives(int rank) override {
    return !simulation_.ranks_[static_cast<std::size_t>(rank)].dead;
  }
  std::string describe_lost(const std::vector<int>& ranks, int64_t) override {
    return encode(ranks);
  }
  std::string calls() override {
    return std::string(500, 'c');
  }
  std::optional<std::string> compare_calls(int, const std::string&) override {
    return std::nullopt;
  }

 private:
  Simulation& simulation_;
  const int rank_;
};

// ---- the simulation -----------------------------------------------------------------------------

inline Simulation::Simulation(SimulationSettings settings)
    : settings_(settings), ranks_(static_cast<std::size_t>(settings.num_ranks)) {
  for (int number = 0; number < settings_.num_ranks; ++number) {
    auto& rank = ranks_[static_cast<std::size_t>(number)];
    if (number % settings_.ranks_per_host == 0) {
      hosts_.push_back(number);
      declared_ns_.push_back(0);
    }
    HostChannel::Settings of_channel;
    // Two hosts claim the same machine, as copies of a virtual machine do.
    const auto machine = "machine " + std::to_string(host_of(number) / 2);
    of_channel.own = {number, "host", {machine, 1, 1}, 1, uint64_t(number) + 1};
    of_channel.world_size = settings_.num_ranks;
    rank.channel = std::make_unique<HostChannel>(
        of_channel, std::make_shared<Probe>(*this, number), [&rank] { return rank.local_ns; });
    rank.store = std::make_unique<Connection>(*this, number);
    if (settings_.through_store) {
      at(now_ns_ + static_cast<int64_t>(random_() % kSecond), [this, number] {
        const auto end = run_thread(number, [this, number](Store& store) {
          ranks_[static_cast<std::size_t>(number)].channel->introduce(store);
        });
        at(end, [this, number] { look(number); });
      });
    }
    introductions_.push_back(of_channel.own);
  }
  if (!settings_.through_store) {
    meet();
  }
}

// All ranks return from a collective call, one after the other.
inline void Simulation::meet() {
  std::vector<uint64_t> hosts;
  for (auto& rank : ranks_) {
    hosts.push_back(rank.channel->find_host(introductions_));
  }
  for (int number = 0; number < settings_.num_ranks; ++number) {
    auto& rank = ranks_[static_cast<std::size_t>(number)];
    rank.local_ns = now_ns_ + static_cast<int64_t>(random_() % (kSecond / 5));
    rank.channel->meet(introductions_, hosts);
    at(rank.local_ns, [this, number] { look(number); });
  }
}

inline HostTable* Simulation::table_of(int host) const {
  for (int rank = hosts_[static_cast<std::size_t>(host)];
       rank < settings_.num_ranks && host_of(rank) == host;
       ++rank) {
    const auto& found = ranks_[static_cast<std::size_t>(rank)];
    if (!found.dead && found.channel->table() != nullptr) {
      return found.channel->table().get();
    }
  }
  return nullptr;
}

inline int64_t Simulation::delay() {
  const auto mean = static_cast<double>(std::max<int64_t>(1, settings_.jitter_ns));
  return static_cast<int64_t>(std::exponential_distribution<double>(1 / mean)(random_));
}

inline void Simulation::run(int64_t until_ns) {
  while (!events_.empty() && events_.top().time_ns <= until_ns) {
    auto event = events_.top();
    events_.pop();
    now_ns_ = event.time_ns;
    event.run();
  }
  now_ns_ = until_ns;
}

inline int64_t Simulation::run_thread(int rank, const std::function<void(Store&)>& work) {
  auto& runs = ranks_[static_cast<std::size_t>(rank)];
  runs.local_ns = now_ns_;
  work(*runs.store);
  note_failure(host_of(rank), runs.local_ns);
  return runs.local_ns;
}

inline void Simulation::note_failure(int host, int64_t time_ns) {
  auto& declared_ns = declared_ns_[static_cast<std::size_t>(host)];
  const auto* table = table_of(host);
  if (declared_ns == 0 && table != nullptr && table->failure.get() != nullptr) {
    declared_ns = time_ns;
  }
}

// The thread of the keeper.
inline void Simulation::keep(int number) {
  auto& rank = ranks_[static_cast<std::size_t>(number)];
  if (rank.dead) {
    return;
  }
  if (now_ns_ < rank.stopped_until_ns) {
    at(rank.stopped_until_ns, [this, number] { keep(number); });
    return;
  }
  const double per_step = settings_.hiccups_per_hour / 3600;
  if (per_step > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < per_step) {
    const auto time = static_cast<int64_t>(random_() % (12 * kSecond));
    if (random_() % 2 == 0) {
      rank.stopped_until_ns = now_ns_ + time;
    } else {
      store_stopped_until_ns_ = now_ns_ + time;
    }
  }
  const auto due_ns = step(number);
  rank.keeps = due_ns != HostChannel::kNever;
  if (rank.keeps) {
    at(std::max(rank.busy_until_ns, due_ns) + delay(), [this, number] { keep(number); });
  }
}

inline int64_t Simulation::step(int number) {
  auto& rank = ranks_[static_cast<std::size_t>(number)];
  int64_t due_ns = 0;
  rank.busy_until_ns = run_thread(number, [&](Store& store) {
    due_ns = rank.channel->should_keep() ? rank.channel->step(store) : HostChannel::kNever;
  });
  return due_ns;
}

// The watchdog of each rank. It also wakes the keeper, as ChannelThreads::check does.
inline void Simulation::look(int number) {
  auto& rank = ranks_[static_cast<std::size_t>(number)];
  if (rank.dead) {
    return;
  }
  const auto table = rank.channel->table();
  rank.local_ns = std::max(rank.local_ns, now_ns_);
  if (stalled_ && host_of(number) != num_hosts() - 1) {
    table->wanted_until_ns = now_ns_ + kSecond;
  }
  if (now_ns_ >= rank.stopped_until_ns) {
    if (!rank.keeps && rank.channel->should_keep()) {
      rank.keeps = true;
      at(now_ns_, [this, number] { keep(number); });
      auto& listeners = listeners_[rank.channel->wake_key()];
      if (std::find(listeners.begin(), listeners.end(), number) == listeners.end()) {
        listeners.push_back(number);
      }
    } else if (
        rank.keeps && now_ns_ >= rank.busy_until_ns &&
        (stalled_ || (table->declared() && !table->failure_posted))) {
      step(number);
    }
  }
  at(now_ns_ + settings_.look_ns, [this, number] { look(number); });
}

// The store has set a key, which wakes the threads that wait for it.
inline void Simulation::wake(const std::string& key, int64_t time_ns) {
  const auto found = listeners_.find(key);
  for (const int number : found == listeners_.end() ? std::vector<int>() : found->second) {
    ++num_requests_;  // the answer, and a new wait
    at(time_ns + settings_.latency_ns + delay(), [this, number] { listen(number); });
  }
}

// The thread that waits for events.
inline void Simulation::listen(int number) {
  auto& rank = ranks_[static_cast<std::size_t>(number)];
  if (rank.dead || !rank.keeps || rank.channel->table()->failure_posted) {
    return;
  }
  if (now_ns_ < rank.stopped_until_ns) {
    at(rank.stopped_until_ns, [this, number] { listen(number); });
    return;
  }
  const auto before = rank.local_ns;  // of the other thread
  bool heard = false;
  run_thread(number, [&](Store& store) { heard = rank.channel->listen(store); });
  rank.local_ns = before;
  if (heard && now_ns_ >= rank.busy_until_ns) {
    step(number);
  }
}

inline void Simulation::kill_rank(int number) {
  ranks_[static_cast<std::size_t>(number)].dead = true;
  // The other ranks of the host detect the end of the process.
  at(now_ns_ + 10 * kMillisecond, [this, number] {
    if (auto* table = table_of(host_of(number))) {
      table->declare(encode(std::vector<int>{number}));
      note_failure(host_of(number), now_ns_);
    }
  });
}

inline void Simulation::lose_host(int host) {
  for (int rank = 0; rank < settings_.num_ranks; ++rank) {
    if (host_of(rank) == host) {
      ranks_[static_cast<std::size_t>(rank)].dead = true;
    }
  }
}

inline std::optional<int64_t> Simulation::started_ns() const {
  for (int host = 0; host < num_hosts(); ++host) {
    const auto* table = table_of(host);
    if (table == nullptr || table->stage == HostTable::Stage::kGathering) {
      return std::nullopt;
    }
  }
  return now_ns_;
}

inline std::vector<int> Simulation::reported(int host) const {
  const auto* table = table_of(host);
  const auto text = table == nullptr ? std::nullopt : table->declared();
  std::vector<int> ranks;
  std::string_view record = text ? *text : std::string_view();
  decode(record, ranks);
  return ranks;
}

inline std::optional<int64_t> Simulation::reported_ns() const {
  int64_t last_ns = 0;
  for (int host = 0; host < num_hosts(); ++host) {
    const auto declared_ns = declared_ns_[static_cast<std::size_t>(host)];
    if (table_of(host) != nullptr && declared_ns == 0) {
      return std::nullopt;
    }
    last_ns = std::max(last_ns, declared_ns);
  }
  return last_ns + settings_.look_ns;  // then all watchdogs have looked
}

inline bool Simulation::reports_falsely() const {
  for (int host = 0; host < num_hosts(); ++host) {
    for (const int rank : reported(host)) {
      if (!ranks_[static_cast<std::size_t>(rank)].dead) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace ddpx::health
