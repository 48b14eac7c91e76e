#include "stall_watch.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "../../os/threads.h"
#include "../calls/call_comparison.h"

namespace ddpx::health {
namespace {

bool has_fewer_calls(const Peer& peer, const StatusPage& own) {
  return peer.num_calls() != 0 && peer.num_calls() < own.num_calls;
}

// Whether the device of a rank is late, and its host is not.
bool is_late_on_device(const Peer& peer, const Wait& wait, const StatusPage& own) {
  return is_behind_on_device(peer.device(), wait.at) && !has_fewer_calls(peer, own);
}

}  // namespace

std::optional<Failure> StallWatch::check(
    std::optional<Wait> wait, const AwakeTime& awake, bool group_failed) {
  const bool waits = wait && !group_failed;
  if (const auto since_ns = waits ? wait->at.since_ns : 0; since_ns != current_.since_ns) {
    const auto over = std::exchange(current_, Current{since_ns, 0, 0, 0, {}});
    if (over.next_warning_ns > 0 && !group_failed) {
      log_end(over);
    }
  }
  if (!waits) {
    return std::nullopt;
  }
  const auto now = now_ns();
  current_.waited_ns = awake.lasted_ns(wait->at.since_ns, now);
  const int64_t warn_ns = StallTimeouts::instance().warn_ns;
  const int64_t raise_ns = this->raise_ns(*wait);
  // This rank asks other hosts for their states when half of the time has passed.
  if (current_.waited_ns <= std::min(warn_ns, raise_ns) / 2) {
    return std::nullopt;
  }
  wait->missing = missing_ranks(state_.peers, *wait);
  state_.want_states();
  current_.asked_ns = current_.asked_ns == 0 ? now : current_.asked_ns;
  // States that a host wrote before the request are out of date. If the keeper of that host has
  // stopped, another rank takes over within this time.
  if (!state_.peers.have_written_since(current_.asked_ns + times::kFastPeriod, wait->missing) &&
      now - current_.asked_ns < times::message_wait(state_.group.lease_ns)) {
    return std::nullopt;
  }
  if (current_.waited_ns >= raise_ns) {
    if (auto failure = find_stall(*wait, current_.waited_ns)) {
      return failure;
    }
  }
  if (current_.waited_ns >= std::max(warn_ns, current_.next_warning_ns)) {
    current_.next_warning_ns = 2 * current_.waited_ns;
    warn(*wait);
  }
  return std::nullopt;
}

// On a device, the backend may end the process when a call times out. Numbers of calls alone do not
// show that a call waits.
int64_t StallWatch::raise_ns(const Wait& wait) const {
  const int64_t raise_ns = StallTimeouts::instance().raise_ns;
  const bool call_waits = state_.group.on_device && wait.kind != Wait::Kind::kCalls;
  const auto timeout_ns = call_waits ? state_.group.timeout_ns() : 0;
  if (timeout_ns <= 0) {
    return raise_ns;
  }
  const auto margin_ns = std::max(times::kLeastMargin, timeout_ns / times::kMarginShare);
  return std::min(raise_ns, std::max(timeout_ns / 2, timeout_ns - margin_ns));
}

// ---- warnings ----------------------------------------------------------------------------------

void StallWatch::warn(const Wait& wait) {
  current_.missing = wait.missing;
  const auto& own = wait.at;
  const bool in_hook = own.doing == Doing::kHook;
  std::ostringstream out;
  out << state_.peers.rank_names().name(state_.group.rank)
      << (in_hook ? " has been " : " has waited ") << in_seconds(current_.waited_ns) << " s"
      << (wait.on_device() ? " for other ranks, on its device, in " : " in ")
      << state_.peers.names().describe(own);
  if (wait.missing.empty()) {
    out << "; every rank has reached this point";
    if (const auto calls = uneven_sequences(own)) {
      out << ", but ranks made different numbers of calls to the group before this step (" << *calls
          << "). Unless these are send and recv, ranks made different collective calls, and wait "
             "in calls that do not match";
    } else {
      out << ", so " << (in_hook ? "the hook, or a call in the hook," : "the communication")
          << " takes long";
    }
  }
  for (const int rank : wait.missing) {
    out << "; missing: rank " << rank << ", " << state_.peers.describe_missing(rank)
        << describe_late(wait, rank);
  }
  const int first = wait.missing.empty() ? -1 : wait.missing.front();
  state_.log("stalled", out.str(), first);
  if (StallTimeouts::instance().with_stacks) {
    for (const int rank : wait.missing) {
      log_stack_of(rank);
    }
  }
}

// The delay of a rank for which a device waits, such as " for 12.3 s", or "".
std::string StallWatch::describe_late(const Wait& wait, int rank) const {
  const auto peer = wait.on_device() ? state_.peers.peer(rank) : nullptr;
  const auto theirs = peer ? peer->activity() : std::nullopt;
  if (!theirs) {
    return {};
  }
  const auto now = now_ns();
  if (const auto device = peer->device();
      device && is_late_on_device(*peer, wait, state_.page.view())) {
    return "; its device has computed step " + std::to_string(device->step) + " for " +
           in_seconds(now - device->since_ns) + " s";
  }
  std::string text = " for " + in_seconds(now - theirs->since_ns) + " s";
  if (has_fewer_calls(*peer, state_.page.view())) {
    text += ", after " + std::to_string(peer->num_calls()) +
            " calls to the group (this rank: " + std::to_string(state_.page.view().num_calls) + ")";
  }
  return text;
}

void StallWatch::log_end(const Current& wait) const {
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

// On a thread of its own, because the late rank may take seconds to answer. Without the thread, the
// warning has no stack.
void StallWatch::log_stack_of(int rank) const {
  (void)os::start_thread(
      [weak = state_.weak_from_this(), peer = state_.peers.peer(rank), rank]() noexcept {
        try {
          const auto stack = request_stack(peer, times::kStackAnswer);
          if (const auto state = stack ? weak.lock() : nullptr) {
            const auto text = "rank " + std::to_string(rank) + " is at:\n" + *stack;
            state->log("stack", text, rank);
          }
        } catch (const std::exception&) {
          // Out of memory, for example.
        }
      });
}

// ---- the stall error ---------------------------------------------------------------------------

std::optional<Failure> StallWatch::find_stall(const Wait& wait, int64_t waited_ns) const {
  const auto& own = wait.at;
  const auto seconds = in_seconds(waited_ns) + " s";
  Failure failure{FailureKind::kStalled, {}, {}};
  for (const int rank : most_to_blame(wait)) {
    const auto peer = state_.peers.peer(rank);
    const bool known = peer != nullptr;
    const bool on_device =
        wait.on_device() && known && is_late_on_device(*peer, wait, state_.page.view());
    failure.lost.push_back(state_.peers.lost_rank(
        rank,
        on_device ? "has not come for " + seconds + ": its device has not computed its gradients"
                  : "has not come for " + seconds +
                        (known ? "" : ", and has no wrapper of this process group yet")));
  }
  if (!wait.missing.empty()) {
    return failure;
  }
  if (const auto calls = uneven_sequences(own)) {
    failure.kind = FailureKind::kMismatch;
    failure.how = "ranks wait for each other in step " + std::to_string(own.step) +
                  ", and had made different numbers of calls to the group before this step (" +
                  *calls + "; send and recv count, too)";
    return failure;
  }
  failure.how = "no rank is missing, but the communication has taken " + seconds +
                " so far: " + state_.peers.names().describe(own);
  return own.doing == Doing::kHook ? std::nullopt : std::make_optional(failure);
}

// A missing rank that waits itself is late because of another rank. While the store does not
// answer, the states of ranks of other hosts are unknown, and the rank that serves the store is to
// blame.
std::vector<int> StallWatch::most_to_blame(const Wait& wait) const {
  auto missing = wait.missing;
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
