// Ranks for tests: several monitors in one process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_store.h"
#include "health/watchdog.h"

namespace ddpx::health {

// Waits for a record, and takes it.
inline Record next_record() {
  while (true) {
    if (auto record = LogQueue::instance().take()) {
      return std::move(*record);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

template <class Condition>
bool eventually(const Condition& condition, int seconds = 10) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (std::chrono::steady_clock::now() < deadline) {
    if (condition()) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// As seen by one of its ranks, on a machine of its own if `identity` is.
inline WatchedGroup group_of(int rank, int world_size, std::string identity = {}) {
  WatchedGroup group;
  group.rank = rank;
  group.world_size = world_size;
  group.identity = std::move(identity);
  group.gone = [] { return false; };
  group.abort = [](const auto&) {};
  return group;
}

inline std::shared_ptr<Monitor> watch(WatchedGroup group, StoreAccess store) {
  return Watchdog::instance().watch(std::move(group), std::move(store));
}

// What a collective call of a construction does.
inline void meet(const std::vector<std::shared_ptr<GroupState>>& ranks) {
  std::vector<std::string> introductions;
  std::vector<uint64_t> hosts;
  for (const auto& rank : ranks) {
    introductions.push_back(rank->introduction());
  }
  for (const auto& rank : ranks) {
    hosts.push_back(rank->find_host(introductions));
  }
  for (const auto& rank : ranks) {
    rank->meet(introductions, hosts);
  }
}

inline void meet(const std::vector<std::shared_ptr<Monitor>>& monitors) {
  std::vector<std::shared_ptr<GroupState>> states;
  for (const auto& monitor : monitors) {
    states.push_back(monitor->state().shared_from_this());
  }
  meet(states);
}

enum class Start { kTogether, kThroughStore };

// A group whose ranks live in this process. Ranks with different letters are on different hosts.
class Ranks {
 public:
  explicit Ranks(
      const std::string& hosts,
      int64_t lease_ns = 15'000'000'000,
      Start start = Start::kTogether,
      std::shared_ptr<FakeStore> with_store = std::make_shared<FakeStore>())
      : store(std::move(with_store)) {
    const auto size = static_cast<int>(hosts.size());
    for (int rank = 0; rank < size; ++rank) {
      gone_.push_back(std::make_shared<std::atomic<bool>>(false));
      aborts_.push_back(std::make_shared<std::atomic<int>>(0));
      auto group = group_of(rank, size, std::string(1, hosts[static_cast<std::size_t>(rank)]));
      group.lease_ns = lease_ns;
      group.gone = [gone = gone_.back()] { return gone->load(); };
      group.abort = [aborts = aborts_.back()](const auto&) { ++*aborts; };
      monitors_.push_back(watch(group, access_to(store)));
    }
    if (start == Start::kTogether) {
      meet();
    }
    const auto all_met = [this] {
      for (const auto& monitor : monitors_) {
        monitor->state().meet();
        const auto peers = monitor->peers().all();
        if (std::count(peers.begin(), peers.end(), nullptr) != 1) {
          return false;
        }
      }
      return true;
    };
    EXPECT_TRUE(eventually(all_met));
  }
  ~Ranks() {
    for (const auto& gone : gone_) {
      *gone = true;
    }
  }

  void meet() {
    health::meet(monitors_);
  }
  std::size_t size() const {
    return monitors_.size();
  }
  Monitor& operator[](std::size_t rank) {
    return *monitors_[rank];
  }
  const std::shared_ptr<Monitor>& shared(std::size_t rank) {
    return monitors_[rank];
  }
  // Ends the threads of a rank, as if its machine were lost.
  void lose(std::size_t rank) {
    monitors_[rank]->page().mark_terminated();  // so that it does not leave
    *gone_[rank] = true;
    monitors_[rank].reset();
  }
  void await_delivery(std::size_t rank) {
    Monitor::await_delivery({monitors_[rank]});
  }
  int num_aborts(std::size_t rank) const {
    return *aborts_[rank];
  }

  const std::shared_ptr<FakeStore> store;

 private:
  std::vector<std::shared_ptr<Monitor>> monitors_;
  std::vector<std::shared_ptr<std::atomic<bool>>> gone_;
  std::vector<std::shared_ptr<std::atomic<int>>> aborts_;
};

}  // namespace ddpx::health
