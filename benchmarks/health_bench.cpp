// Times what a watched rank does in a step for its peers, call by call, and what its threads use.
//
//   health_bench RANKS [seconds per figure]
//
// RANKS live in this process, over a store in memory. One watchdog watches for all of them. Prints
// one JSON object: nanoseconds a call, the least of several runs, and the percentage of one core
// that the threads of a rank use in steady state.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_store.h"
#include "health/calls/step_guard.h"
#include "health/calls/step_tracker.h"
#include "health/watchdog.h"

namespace {

using namespace ddpx::health;
using Clock = std::chrono::steady_clock;

std::vector<std::shared_ptr<Monitor>> make_ranks(int size) {
  const auto store = std::make_shared<FakeStore>();
  std::vector<std::shared_ptr<Monitor>> monitors;
  for (int rank = 0; rank < size; ++rank) {
    WatchedGroup group;
    group.rank = rank;
    group.world_size = size;
    group.gone = [] { return false; };
    group.abort = [] {};
    monitors.push_back(Watchdog::instance().watch(group, access_to(store)));
  }
  const auto met = [&monitors] {
    return std::all_of(monitors.begin(), monitors.end(), [](const auto& monitor) {
      monitor->state().meet();
      const auto peers = monitor->peers().all();
      return std::count(peers.begin(), peers.end(), nullptr) == 1;
    });
  };
  while (!met()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return monitors;
}

double ns_per_call(double seconds, const std::function<void()>& call) {
  constexpr int kRuns = 7;
  constexpr int kBatch = 1000;
  double least = std::numeric_limits<double>::max();
  for (int run = 0; run < kRuns; ++run) {
    const auto start = Clock::now();
    const auto until = start + std::chrono::duration<double>(seconds / kRuns);
    long num_calls = 0;
    auto now = start;
    do {
      for (int i = 0; i < kBatch; ++i) {
        call();
      }
      num_calls += kBatch;
      now = Clock::now();
    } while (now < until);
    const auto ns = std::chrono::duration<double, std::nano>(now - start).count();
    least = std::min(least, ns / static_cast<double>(num_calls));
  }
  return least;
}

double percent_of_core(double seconds, int num_ranks) {
  const auto before = std::clock();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const auto used = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  return 100 * used / seconds / num_ranks;
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 0;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  if (size < 2 || seconds <= 0) {
    std::fprintf(stderr, "usage: health_bench RANKS [seconds per figure]; 2 ranks or more\n");
    return 2;
  }
  const auto ranks = make_ranks(size);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the start is over
  const auto percent = percent_of_core(10 * seconds, size);
  std::vector<StepTracker> trackers;
  for (const auto& rank : ranks) {
    trackers.emplace_back(rank);
  }
  auto& own = trackers.front();
  StepGuard guard(ranks.front());
  std::array<float, 1024> bucket{};
  bucket.fill(1.0F);  // zeros would be passed over

  const auto begin = ns_per_call(seconds, [&] { guard.check(); });
  const auto phase = ns_per_call(seconds, [&] { own.publish(Doing::kBackward); });
  own.begin_step(0);
  const auto launch = ns_per_call(seconds, [&] { own.publish_launch(0, 4096, 6); });
  const auto result = ns_per_call(seconds, [&] { own.add_result(bucket.data(), sizeof(bucket)); });
  // All ranks are through with each step, so that every page is read and compared.
  uint32_t step = 0;
  const auto make_steps = [&](bool checked) {
    return ns_per_call(seconds, [&, checked] {
      ++step;
      for (auto& each : trackers) {
        each.begin_step(step);
        each.publish_launch(0, 4096, 6);
      }
      if (checked) {
        guard.compare_calls(own.publish_results(), {});
      }
    });
  };
  const auto unchecked = make_steps(false);
  const auto check_calls = std::max(0.0, make_steps(true) - unchecked);
  std::printf(
      "{\"ranks\": %d, \"check\": %.1f, \"publish\": %.1f, \"publish_launch\": %.1f, "
      "\"add_result\": %.1f, \"check_calls\": %.1f, \"percent_of_core\": %.4f}\n",
      size,
      begin,
      phase,
      launch,
      result,
      check_calls,
      percent);
  std::fflush(stdout);
  std::_Exit(0);  // the watchdog's thread goes on to the end
}
