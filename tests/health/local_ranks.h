// Ranks for tests: several monitors in one process.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
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
  return poll_until(now_ns() + seconds * kSecond, 5 * kMillisecond, condition);
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

// A group from the view of one rank. Ranks with different identities are on different machines.
inline WatchedGroup group_of(int rank, int world_size, std::string identity = {}) {
  WatchedGroup group;
  group.rank = rank;
  group.world_size = world_size;
  group.identity = std::move(identity);
  group.gone = [] { return false; };
  group.abort = [] {};
  return group;
}

// The watchdog monitors the group as long as the result lives.
inline std::shared_ptr<Monitor> watch(WatchedGroup group, StoreAccess store) {
  const auto monitor = Watchdog::instance().watch(std::move(group), std::move(store));
  return {monitor.get(), [monitor](Monitor*) { monitor->retire(); }};
}

// Does the same as the collective call of a construction.
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

// kCounted: ranks with the same calls have the same number of calls. kOnDevice: counted calls that
// run on a device.
enum class Calls { kUncounted, kCounted, kOnDevice };

// A group whose ranks live in this process. Ranks with different letters are on different hosts.
class Ranks {
 public:
  explicit Ranks(
      const std::string& hosts,
      int64_t lease_ns = times::kLease,
      Start start = Start::kTogether,
      Calls calls = Calls::kUncounted) {
    const auto size = static_cast<int>(hosts.size());
    for (int rank = 0; rank < size; ++rank) {
      aborts_.push_back(std::make_shared<std::atomic<int>>(0));
      num_calls_.push_back(std::make_shared<std::atomic<uint64_t>>(0));
      auto group = group_of(rank, size, std::string(1, hosts[static_cast<std::size_t>(rank)]));
      group.lease_ns = lease_ns;
      group.abort = [aborts = aborts_.back()] { ++*aborts; };
      group.on_device = calls == Calls::kOnDevice;
      group.same_sequence = calls != Calls::kUncounted;
      group.sequence = [number = num_calls_.back()] { return number->load(); };
      group.timeout_ns = [timeout = timeout_ns] { return timeout->load(); };
      monitors_.push_back(watch(group, access_to(store)));
    }
    if (start == Start::kTogether) {
      meet();
    }
    const auto all_met = [this] {
      for (const auto& monitor : monitors_) {
        monitor->state().meet();
        if (!monitor->peers().all_are_known()) {
          return false;
        }
      }
      return true;
    };
    EXPECT_TRUE(eventually(all_met));
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
    monitors_[rank]->page().end_as(Presence::kTerminated);  // the destructor then does not leave
    monitors_[rank].reset();
  }
  void await_delivery(std::size_t rank) {
    Monitor::await_delivery({monitors_[rank]});
  }
  int num_aborts(std::size_t rank) const {
    return *aborts_[rank];
  }
  void make_calls(std::size_t rank, uint64_t number) {
    *num_calls_[rank] = number;
  }
  // The next warning of a rank.
  std::string warning_of(std::size_t rank) {
    return await_record(rank, "stalled").message;
  }
  // Waits for a record of this event.
  Record await_record(std::size_t rank, const std::string& event) {
    while (true) {
      auto record = next_record();
      if (record.event == event && record.group.lock().get() == &monitors_[rank]->state()) {
        return record;
      }
    }
  }
  // The lost or late ranks, in the report of a rank.
  std::vector<int> blamed_by(std::size_t rank) {
    std::vector<int> ranks;
    if (const auto report = monitors_[rank]->report()) {
      for (const auto& lost : report->failure.lost) {
        ranks.push_back(lost.rank);
      }
    }
    return ranks;
  }

  const std::shared_ptr<FakeStore> store = std::make_shared<FakeStore>();
  const std::shared_ptr<std::atomic<int64_t>> timeout_ns =
      std::make_shared<std::atomic<int64_t>>(0);

 private:
  std::vector<std::shared_ptr<Monitor>> monitors_;
  std::vector<std::shared_ptr<std::atomic<int>>> aborts_;
  std::vector<std::shared_ptr<std::atomic<uint64_t>>> num_calls_;
};

}  // namespace ddpx::health
