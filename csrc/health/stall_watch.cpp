#include "stall_watch.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>

#include "calls.h"
#include "stacks.h"

namespace ddpx::health {
namespace {

constexpr int64_t kWritesNs = 500'000'000;  // how often hosts that are asked write
constexpr auto kTimeForStack = std::chrono::milliseconds(2000);

}  // namespace

std::optional<Failure> StallWatch::look(const AwakeTime& awake, bool group_failed) {
  const auto own = state_.activity();
  const bool waits = may_wait(own.doing) && !group_failed;
  if (const auto since_ns = waits ? own.since_ns : 0; since_ns != wait_.since_ns) {
    const auto over = std::exchange(wait_, Wait{since_ns, 0, 0, 0, {}});
    if (over.next_warning_ns > 0 && !group_failed) {
      log_end(over);
    }
  }
  if (!waits) {
    return std::nullopt;
  }
  const auto now = now_ns();
  wait_.waited_ns = awake.lasted_ns(own.since_ns, now);
  const int64_t warn_ns = StallTimeouts::instance().warn_ns;
  const int64_t raise_ns = StallTimeouts::instance().raise_ns;
  // Other hosts are asked for their states when half of the time has passed.
  if (wait_.waited_ns <= std::min(warn_ns, raise_ns) / 2) {
    return std::nullopt;
  }
  state_.want_states();
  wait_.asked_ns = wait_.asked_ns == 0 ? now : wait_.asked_ns;
  // What a host wrote before it was asked is out of date. Within a quarter of a lease, another rank
  // takes over from a keeper that has stopped.
  const auto missing = state_.peers.missing(own);
  if (!state_.peers.have_written_since(wait_.asked_ns + kWritesNs, missing) &&
      now - wait_.asked_ns < state_.group.lease_ns / 4) {
    return std::nullopt;
  }
  if (wait_.waited_ns >= raise_ns) {
    if (auto failure = find_stall(own, wait_.waited_ns, missing)) {
      return failure;
    }
  }
  if (wait_.waited_ns >= std::max(warn_ns, wait_.next_warning_ns)) {
    wait_.next_warning_ns = 2 * wait_.waited_ns;
    warn(own, missing);
  }
  return std::nullopt;
}

// ---- warnings ----------------------------------------------------------------------------------

void StallWatch::warn(const Activity& own, const std::vector<int>& missing) {
  wait_.missing = missing;
  const bool in_hook = own.doing == Doing::kHook;
  std::ostringstream out;
  out << state_.peers.rank_names().name(state_.group.rank)
      << (in_hook ? " has been " : " has waited ") << in_seconds(wait_.waited_ns) << " s in "
      << state_.peers.names().describe(own);
  if (missing.empty()) {
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
  for (const int rank : missing) {
    out << "; missing: rank " << rank << ", " << state_.peers.describe_missing(rank);
  }
  const int first = missing.empty() ? -1 : missing.front();
  state_.log("stalled", out.str(), first);
  if (StallTimeouts::instance().with_stacks) {
    for (const int rank : missing) {
      log_stack_of(rank);
    }
  }
}

void StallWatch::log_end(const Wait& wait) const {
  const auto names = state_.peers.rank_names();
  std::string ranks;
  for (const int rank : wait.missing) {
    ranks += (ranks.empty() ? "" : ", ") + names.name(rank);
  }
  const int own = state_.group.rank;
  const std::string verb = wait.missing.size() > 1 ? " are back" : " is back";
  const auto who = ranks.empty() ? names.name(own) + " goes on" : ranks + verb;
  state_.log("stall_over", who + " after " + in_seconds(wait.waited_ns) + " s", own);
}

// On a thread of its own, since an answer takes a while.
void StallWatch::log_stack_of(int rank) const {
  std::thread([weak = state_.weak_from_this(), peer = state_.peers.peer(rank), rank]() noexcept {
    try {
      const auto stack = request_stack(peer, kTimeForStack);
      if (const auto state = stack ? weak.lock() : nullptr) {
        const auto text = "rank " + std::to_string(rank) + " is at:\n" + *stack;
        state->log("stack", text, rank);
      }
    } catch (const std::exception&) {
      // Out of memory, for example. The stack is left out.
    }
  }).detach();
}

// ---- the stall error ---------------------------------------------------------------------------

std::optional<Failure> StallWatch::find_stall(
    const Activity& own, int64_t waited_ns, const std::vector<int>& missing) const {
  const auto seconds = in_seconds(waited_ns) + " s";
  Failure failure{FailureKind::kStalled, {}, {}};
  for (const int rank : most_to_blame(missing)) {
    const bool known = state_.peers.peer(rank) != nullptr;
    failure.lost.push_back(state_.peers.lost_rank(
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
                " so far: " + state_.peers.names().describe(own);
  return own.doing == Doing::kHook ? std::nullopt : std::make_optional(failure);
}

// A rank that waits itself is late because of another one. While the store does not answer, the
// states of ranks of other hosts are unknown, and the rank that may serve the store is to blame.
std::vector<int> StallWatch::most_to_blame(std::vector<int> missing) const {
  const bool store_silent = state_.channel->store_state() >= StoreState::kSlow;
  const auto is_unknown = [&](int rank) {
    const auto peer = state_.peers.peer(rank);
    return store_silent && !(peer && peer->local());
  };
  const auto is_to_blame = [&](int rank) {
    const auto peer = state_.peers.peer(rank);
    const auto activity = peer ? peer->activity() : std::nullopt;
    return !is_unknown(rank) && (!activity || !may_wait(activity->doing) || peer->stopped());
  };
  if (std::any_of(missing.begin(), missing.end(), is_to_blame)) {
    std::erase_if(missing, [&](int rank) { return !is_to_blame(rank); });
  } else if (
      const auto serving = state_.peers.store_rank();
      serving && is_unknown(*serving) &&
      std::find(missing.begin(), missing.end(), *serving) != missing.end()) {
    missing = {*serving};
  }
  return missing;
}

std::optional<std::string> StallWatch::uneven_sequences(const Activity& own) const {
  const auto calls = state_.page.view().calls.find(own.model, own.step);
  return calls ? health::uneven_sequences(calls_by_rank(state_.peers, *calls)) : std::nullopt;
}

}  // namespace ddpx::health
