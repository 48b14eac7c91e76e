// Warnings about ranks that are late, the stall error, and stacks of other ranks.
#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "calls.h"
#include "monitor.h"
#include "stall_timeouts.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kLateNs = 1'000'000'000;  // peers may wait for a rank that is in backward so long
constexpr int64_t kHeardNs = 1'200'000'000;  // hosts that are asked write twice a second
constexpr auto kBetweenLooks = milliseconds(10);
constexpr std::size_t kMostNames = 4;

}  // namespace

void Monitor::look_for_stalls() {
  const auto own = page_.view().activity();
  const bool waits = may_wait(own.doing) && !failed();
  if (const auto since_ns = waits ? own.since_ns : 0; since_ns != stall_.since_ns) {
    const auto over = std::exchange(stall_, Stall{since_ns, 0, 0, 0, {}});
    if (over.next_warning_ns > 0 && !failed()) {
      warn_of_end(over);
    }
  }
  if (!waits) {
    return;
  }
  stall_.waited_ns = waited_ns(own);
  const int64_t warn_ns = StallTimeouts::instance().warn_ns;
  const int64_t raise_ns = StallTimeouts::instance().raise_ns;
  // Other hosts are asked for their states when half of the time has passed.
  if (stall_.waited_ns <= std::min(warn_ns, raise_ns) / 2) {
    return;
  }
  want_states();
  stall_.asked_ns = stall_.asked_ns == 0 ? looked_ns_ : stall_.asked_ns;
  if (peers_.any_remote() && looked_ns_ - stall_.asked_ns < kHeardNs) {
    return;
  }
  if (stall_.waited_ns >= raise_ns) {
    const auto missing = peers_.missing(own);
    if (auto failure = find_stall(own, stall_.waited_ns, missing)) {
      declare(std::move(*failure));
      return;
    }
  }
  if (stall_.waited_ns >= std::max(warn_ns, stall_.next_warning_ns)) {
    stall_.next_warning_ns = 2 * stall_.waited_ns;
    warn_of_stall(own);
  }
}

void Monitor::warn_of_end(const Stall& stall) const {
  const auto names = peers_.rank_names();
  std::string ranks;
  for (const int rank : stall.missing) {
    ranks += (ranks.empty() ? "" : ", ") + names.name(rank);
  }
  const std::string verb = stall.missing.size() > 1 ? " are back" : " is back";
  log(Level::kWarning,
      "stall_over",
      (ranks.empty() ? names.name(group_.rank) + " goes on" : ranks + verb) + " after " +
          in_seconds(stall.waited_ns) + " s",
      group_.rank);
}

void Monitor::warn_of_stall(const Activity& own) {
  stall_.missing = peers_.missing(own);
  const bool in_hook = own.doing == Doing::kHook;
  std::ostringstream out;
  out << peers_.rank_names().name(group_.rank) << (in_hook ? " has been " : " has waited ")
      << in_seconds(stall_.waited_ns) << " s in " << peers_.names().describe(own);
  if (stall_.missing.empty()) {
    out << "; all ranks have come so far";
    if (const auto calls = uneven_sequences(own)) {
      out << ", but not with the same number of calls to the group before this step (" << *calls
          << "): if none of these are send and recv, ranks made different collective calls, and "
             "wait in calls that do not fit together";
    } else {
      out << ", so that the " << (in_hook ? "hook, or what it waits for," : "communication")
          << " takes long";
    }
  }
  for (const int rank : stall_.missing) {
    out << "; missing: rank " << rank << ", " << peers_.describe_missing(rank);
  }
  const int first = stall_.missing.empty() ? -1 : stall_.missing.front();
  log(Level::kWarning, "stalled", out.str(), first);
  if (!StallTimeouts::instance().with_stacks) {
    return;
  }
  for (const int rank : stall_.missing) {
    // A thread of its own, since an answer takes a while.
    std::thread([self = weak_from_this(), rank]() noexcept {
      try {
        const auto monitor = self.lock();
        if (const auto stack =
                monitor ? monitor->stack_of(rank, milliseconds(2000)) : std::nullopt) {
          monitor->log(
              Level::kWarning,
              "stack",
              "rank " + std::to_string(rank) + " is at:\n" + *stack,
              rank);
        }
      } catch (const std::exception&) {
        // Out of memory, for example. The stack is left out.
      }
    }).detach();
  }
}

std::optional<std::string> Monitor::uneven_sequences(const Activity& own) const {
  const auto calls = page_.view().calls.find(own.model, own.step);
  return calls ? health::uneven_sequences(calls_by_rank(peers_, *calls)) : std::nullopt;
}

std::optional<Failure> Monitor::find_stall(
    const Activity& own, int64_t waited_ns, const std::vector<int>& missing) const {
  const auto seconds = in_seconds(waited_ns) + " s";
  Failure failure{FailureKind::kStalled, {}, {}};
  for (const int rank : most_to_blame(missing)) {
    const bool known = peers_.peer(rank) != nullptr;
    failure.lost.push_back(peers_.lost_rank(
        rank,
        "has not come for " + seconds + (known ? "" : ", and has not wrapped its model yet")));
  }
  if (!missing.empty()) {
    return failure;
  }
  if (const auto calls = uneven_sequences(own)) {
    failure.kind = FailureKind::kMismatch;
    failure.how = "ranks wait for each other in step " + std::to_string(own.step) +
                  ", before which they had not made the same number of calls to the group (" +
                  *calls + "; send and recv count, too)";
    return failure;
  }
  failure.how = "no rank is missing, but the communication has taken " + seconds +
                " so far: " + peers_.names().describe(own);
  return own.doing == Doing::kHook ? std::nullopt : std::make_optional(failure);
}

// A rank that waits itself is late because of another one. While the store does not answer, the
// states of ranks of other hosts are unknown, and rank 0, which may host the store, is to blame.
std::vector<int> Monitor::most_to_blame(std::vector<int> missing) const {
  const bool store_silent = threads_->store_state() >= StoreState::kSlow;
  const auto is_unknown = [&](int rank) {
    const auto peer = peers_.peer(rank);
    return store_silent && !(peer && peer->local());
  };
  const auto is_to_blame = [&](int rank) {
    const auto peer = peers_.peer(rank);
    const auto activity = peer ? peer->activity() : std::nullopt;
    return !is_unknown(rank) && (!activity || !may_wait(activity->doing) || peer->stopped());
  };
  if (std::any_of(missing.begin(), missing.end(), is_to_blame)) {
    std::erase_if(missing, [&](int rank) { return !is_to_blame(rank); });
  } else if (!missing.empty() && missing.front() == 0 && is_unknown(0)) {
    missing = {0};
  }
  return missing;
}

// Publishes what only this rank can know, and answers requests for its stack.
void Monitor::look_at_self() {
  const auto own = page_.view().activity();
  auto& page = page_.view();
  std::string detail;
  if (own.doing == Doing::kBackward && now_ns() - own.since_ns > kLateNs) {
    MissingParams missing_params;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      missing_params = missing_params_[own.model];
    }
    const auto missing = missing_params ? missing_params() : std::vector<std::string>();
    detail = missing.empty() ? "" : "without gradients yet for " + join_names(missing, kMostNames);
  }
  if (detail != page.detail.read()) {
    page.detail.write(detail);
  }
  const auto wanted = page.num_stack_requests.load();
  if (std::exchange(num_stacks_served_, wanted) != wanted) {
    log(Level::kInfo, "stack_wanted", {}, group_.rank);
  }
}

std::optional<std::string> Monitor::stack_of(int rank, milliseconds timeout) const {
  const auto peer = peers_.peer(rank);
  if (!peer || !peer->page()) {
    return std::nullopt;
  }
  auto& page = *peer->page();
  const auto before = page.stack.num_writes();
  page.num_stack_requests.fetch_add(1);
  // Bounded, because a clock's nanoseconds overflow.
  const auto limit = std::clamp<milliseconds>(timeout, milliseconds(0), std::chrono::hours(24));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (page.stack.num_writes() == before) {
    if (std::chrono::steady_clock::now() >= deadline || peer->ended()) {
      return std::nullopt;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return page.stack.read();
}

void Monitor::answer_stack_request(const std::string& stack) {
  page_.view().stack.write(stack);
}

}  // namespace ddpx::health
