// What a monitor says of ranks that wait, and of ranks that are waited for.
#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "monitor.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

// What a rank finds out about itself is of use to others only if it is late.
constexpr int64_t kLateNs = 1'000'000'000;

constexpr auto kBetweenLooks = milliseconds(10);

// Hosts that are asked write twice a second.
constexpr int64_t kHeardNs = 1'200'000'000;

constexpr int64_t kSilentNs = 2'300'000'000;  // a host that has written nothing since is stopped

constexpr std::size_t kMostNames = 4;

}  // namespace

void Monitor::look_for_stalls() {
  const auto own = page_.view().activity();
  const bool waits = may_wait(own.doing) && !failed();
  const auto waited = waits ? waited_ns(own) : 0;
  if (!has_heard(waited)) {
    return;
  }
  auto due = stalls_.look(waits ? own.since_ns : 0, waited, StallTimeouts::instance());
  if (due == StallTimer::Due::kGiveUp && !give_up(waited)) {
    due = stalls_.look_on(waited, StallTimeouts::instance());
  }
  switch (due) {
    case StallTimer::Due::kNothing:
    case StallTimer::Due::kGiveUp:
      break;
    case StallTimer::Due::kWarning:
      warn_of_stall(own, waited);
      break;
    case StallTimer::Due::kOver:
      if (!failed()) {
        log(Level::kWarning, "stall_over", describe_end_of_stall(), group_.rank);
      }
      break;
  }
}

// Whether this rank knows what ranks of other hosts do. It asks for their states when half of the
// time to the first warning has passed.
bool Monitor::has_heard(int64_t waited_ns) {
  const auto& timeouts = StallTimeouts::instance();
  const auto first_ns = std::min<int64_t>(timeouts.warn_ns, timeouts.raise_ns);
  if (waited_ns <= first_ns / 2) {
    asked_ns_ = 0;
    return true;
  }
  want_states();
  asked_ns_ = asked_ns_ == 0 ? looked_ns_ : asked_ns_;
  return looked_ns_ - asked_ns_ >= kHeardNs || !peers_.any_remote();
}

std::string Monitor::describe_end_of_stall() const {
  const auto after = " after " + in_seconds(stalls_.last_wait_ns()) + " s";
  if (warned_of_.empty()) {
    return peers_.rank_names().name(group_.rank) + " goes on" + after;
  }
  std::string ranks;
  for (const int rank : warned_of_) {
    ranks += (ranks.empty() ? "" : ", ") + peers_.rank_names().name(rank);
  }
  return ranks + (warned_of_.size() == 1 ? " is back" : " are back") + after;
}

void Monitor::warn_of_stall(const Activity& own, int64_t waited_ns) {
  const auto missing = peers_.missing(own, page_.view().progress());
  warned_of_ = missing;
  std::ostringstream out;
  out << peers_.rank_names().name(group_.rank)
      << (own.doing == Doing::kHook ? " has been " : " has waited ") << in_seconds(waited_ns)
      << " s in " << peers_.names().describe(own);
  if (missing.empty()) {
    out << "; all ranks have come so far";
    if (const auto calls = uneven_sequences(own)) {
      out << ", but not with the same number of calls to the group before this step (" << *calls
          << "): if none of these are send and recv, ranks made different collective calls, and "
             "wait in those that do not fit together";
    } else {
      out << ", so that it is the "
          << (own.doing == Doing::kHook ? "hook, or what it waits for," : "communication")
          << " that takes long";
    }
  }
  for (const int rank : missing) {
    out << "; missing: rank " << rank << ", " << peers_.describe_missing(rank);
  }
  log(Level::kWarning, "stalled", out.str(), missing.empty() ? -1 : missing.front());
  if (!StallTimeouts::instance().with_stacks) {
    return;
  }
  for (const int rank : missing) {
    // A thread of its own: an answer takes a while, and the watchdog has to look on.
    std::thread([self = weak_from_this(), rank]() noexcept {
      if (const auto monitor = self.lock()) {
        monitor->log_stack_of(rank);
      }
    }).detach();
  }
}

void Monitor::log_stack_of(int rank) const noexcept {
  try {
    if (const auto stack = stack_of(rank, milliseconds(2000))) {
      log(Level::kWarning, "stack", "rank " + std::to_string(rank) + " is at:\n" + *stack, rank);
    }
  } catch (const std::exception&) {  // out of memory, say: the warning goes without
  }
}

std::optional<std::string> Monitor::uneven_sequences(const Activity& own) const {
  const auto calls = page_.view().calls(own.model, own.step);
  return calls ? peers_.uneven_sequences(*calls) : std::nullopt;
}

// Whether it did: in a hook for which no rank is missing there is nothing to give up.
bool Monitor::give_up(int64_t waited_ns) {
  const auto own = page_.view().activity();
  auto missing = peers_.missing(own, page_.view().progress());
  if (missing.empty() && peers_.any_remote()) {
    if (looked_ns_ - asked_ns_ < kSilentNs) {
      return false;  // until the next look
    }
    missing = silent_ranks();
  }
  auto failure = find_stall(own, waited_ns, std::move(missing));
  if (failure) {
    declare(std::move(*failure));
  }
  return failure.has_value();
}

// Why this rank has waited in vain; none if it is in a hook for which no rank is missing.
std::optional<Failure> Monitor::find_stall(
    const Activity& own, int64_t waited_ns, std::vector<int> missing) const {
  const auto seconds = in_seconds(waited_ns) + " s";
  if (const auto calls = missing.empty() ? uneven_sequences(own) : std::nullopt) {
    return Failure{
        FailureKind::kMismatch,
        {},
        "ranks wait for each other in step " + std::to_string(own.step) +
            ", before which they had not made the same number of calls to the group (" + *calls +
            "; send and recv count, too)"};
  }
  if (missing.empty()) {
    const auto how = "no rank is missing, but the communication has taken " + seconds +
                     " so far: " + peers_.names().describe(own);
    return own.doing == Doing::kHook ? std::nullopt
                                     : std::make_optional(Failure{FailureKind::kStalled, {}, how});
  }
  Failure failure{FailureKind::kStalled, {}, {}};
  const auto what = "has not come for " + seconds;
  for (const int rank : most_to_blame(std::move(missing))) {
    if (const auto peer = peers_.peer(rank)) {
      const auto& who = peer->introduction();
      failure.lost.push_back(
          {rank, who.host, who.process.pid, what + " (" + peers_.whereabouts(*peer) + ")", {}, {}});
    } else {
      failure.lost.push_back(
          {rank, "unknown", 0, what + ", and has not wrapped its model yet", {}, {}});
    }
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

// Of other machines, those that have come as far as this rank, but have told nothing since it asks.
std::vector<int> Monitor::silent_ranks() const {
  std::vector<int> ranks;
  const auto* table = threads_->table();
  const bool answers = threads_->store_state() == StoreState::kAnswers && table != nullptr;
  const auto silent = answers ? peers_.find_silent(asked_ns_, table->read_ns) : std::nullopt;
  for (const auto& lost_rank : silent ? silent->lost : std::vector<LostRank>()) {
    ranks.push_back(lost_rank.rank);
  }
  return ranks;
}

// A rank that waits itself is late because of another one. Of those that can be known of through
// the store alone nothing is known while it does not answer; then rank 0, which may host it, is.
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

// What only this rank can find out, for peers that wait for it.
void Monitor::look_at_self() {
  const auto own = page_.view().activity();
  auto& layout = page_.view().layout();
  std::string detail;
  if (own.doing == Doing::kBackward && now_ns() - own.since_ns > kLateNs) {
    std::shared_ptr<Subject> subject;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = subjects_.find(own.model);
      subject = found == subjects_.end() ? nullptr : found->second.lock();
    }
    const auto missing = subject ? subject->missing_params() : std::vector<std::string>();
    if (!missing.empty()) {
      detail = "without gradients yet for " + join_names(missing, kMostNames);
    }
  }
  if (detail != layout.detail.read()) {
    layout.detail.write(detail);
  }
  const auto wanted = layout.num_stack_requests.load();
  if (std::exchange(num_stacks_served_, wanted) != wanted) {
    log(Level::kInfo, "stack_wanted", {}, group_.rank);
  }
}

std::optional<std::string> Monitor::stack_of(int rank, milliseconds timeout) const {
  const auto peer = peers_.peer(rank);
  if (!peer || !peer->page()) {
    return std::nullopt;
  }
  auto& layout = peer->page()->layout();
  const auto before = layout.stack.num_writes();
  layout.num_stack_requests.fetch_add(1);
  // Bounded, because a clock's nanoseconds overflow.
  const auto timeouts = std::clamp<milliseconds>(timeout, milliseconds(0), std::chrono::hours(24));
  const auto deadline = std::chrono::steady_clock::now() + timeouts;
  while (layout.stack.num_writes() == before) {
    if (std::chrono::steady_clock::now() >= deadline || peer->watch()->ended()) {
      return std::nullopt;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return layout.stack.read();
}

void Monitor::answer_stack_request(const std::string& stack) {
  page_.view().layout().stack.write(stack);
}

}  // namespace ddpx::health
