// The methods of Monitor that declare and raise the failure of the group.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <thread>

#include "../os/threads.h"
#include "calls/uneven_waits.h"
#include "monitor.h"
#include "verdict/lost_ranks.h"

namespace ddpx::health {
namespace {

constexpr std::size_t kMostHow = 7000;  // bytes of a mismatch, so that it fits into the host table

// gloo, NCCL and shm say "Timed out waiting 1800000ms for recv operation to complete".
bool says_timeout(const std::string& error) {
  return error.find("imed out") != std::string::npos || error.find("imeout") != std::string::npos;
}

// The host has queued work behind the calls of its device, and must not use results of aborted
// calls.
void interrupt_script(const GroupState& state) {
  const auto raise = interrupt.load();
  const auto& page = state.page.view();
  const bool has_work = page.device.known() || page.captures;
  if (raise != nullptr && has_work && !page.trains_in_thread) {
    raise(state.own.token);
  }
}

}  // namespace

// ---- reports -----------------------------------------------------------------------------------

std::optional<RankReport> Monitor::report() const {
  const auto* failure = failure_.get();
  if (!failure) {
    return std::nullopt;
  }
  const auto own = state_->activity();
  RankReport found;
  found.failure = *failure;
  found.rank = state_->group.rank;
  found.step = own.training_step();
  found.doing = own.doing;
  found.names = peers().rank_names();
  found.can_shrink = state_->group.survivors_live_on && !state_->has_lease();
  if (found.is_about_this_rank()) {
    found.own_stack = page().view().stack.read();
  }
  if (own.doing == Doing::kWaiting || own.doing == Doing::kHook) {
    found.bucket = own.bucket;
    found.params = peers().names().params(own.model, own.bucket);
  }
  return found;
}

void Monitor::raise_if_failed(const std::string& said) {
  auto found = failed() && !is_forked() ? report() : std::nullopt;
  if (!found) {
    return;
  }
  // Over shm, the error of a call may be the report of another rank, which adds no facts.
  if (said.find("[ddpx rank ") == std::string::npos) {
    found->said = said;
  }
  const auto& failure = found->failure;
  const std::string name = error_name(failure.kind);
  if (failure.lost.empty()) {
    page().fail(name + ": " + failure.how, /*blames_peer=*/false);
  } else {
    const bool stalled = failure.kind == FailureKind::kStalled;
    page().fail(
        name + (stalled ? ": it gave up waiting for rank " : ": it lost rank ") +
            std::to_string(failure.first_rank()),
        /*blames_peer=*/true);
  }
  if (state_->group.on_device) {
    poll_until(failed_ns_ + times::kMostAbort, times::kFailurePoll, [this] {
      return state_->abort->has_ended.load();
    });
  }
  raise(*found);
}

void Monitor::raise_mismatch(Failure mismatch) {
  mismatch.how.resize(cut_utf8(mismatch.how, kMostHow));
  declare(mismatch);
  raise_if_failed();
  throw std::logic_error("a failure that was declared was not raised");
}

void Monitor::declare(const Failure& failure) {
  auto* table = state_->table();
  // If another rank of the host has declared a failure, this rank takes over that failure.
  const bool is_first = failure_.declare([&](Failure& own) {
    const auto standing =
        table == nullptr ? std::nullopt : Failure::decode(table->declare(failure.encode()));
    own = standing.value_or(failure);
    failed_ns_ = now_ns();
  });
  if (!is_first) {
    return;
  }
  log_failure();  // before the abort: the stack of this rank shows the calls that the abort ends
  start_abort();
  if (table == nullptr) {
    state_->channel->post_failure(failure_.get()->encode());  // once the store answers
  }
  state_->channel->check(awake_.since_ns());  // the keeper posts it
}

// On a thread of its own, if one can start: NCCL may take long, and the watchdog must not wait.
void Monitor::start_abort() const {
  const auto run = [weak = std::weak_ptr(state_),
                    on_device = state_->group.on_device,
                    abort_group = state_->group.abort,
                    abort = state_->abort] {
    if (on_device) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(times::kBeforeAbort));
      if (const auto state = weak.lock()) {
        interrupt_script(*state);
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(times::kInterruptDelay));
    }
    abort->has_begun = true;
    abort_group();
    abort->has_ended = true;
  };
  if (!os::start_thread(run)) {
    run();
  }
}

// An exception, for lack of memory for example, must not prevent the abort.
void Monitor::log_failure() const {
  try {
    const auto found = *report();
    auto message = found.failure.describe(found.names);
    std::replace(message.begin(), message.end(), '\n', ' ');
    // Not a warning: each rank prints its report when it raises, or after SIGTERM.
    state_->log("rank_failed", message, found.failure.first_rank());
    if (found.is_about_this_rank()) {
      state_->log("stack_wanted", {}, state_->group.rank);  // for its report
    }
  } catch (const std::exception&) {
    // Each rank still raises its report.
  }
}

// ---- searches ----------------------------------------------------------------------------------

std::optional<Failure> Monitor::find_failure(const std::optional<Wait>& wait) {
  const bool waits =
      wait && (wait->on_device() || waits_for_peers(wait->at.doing)) && !state_->is_terminated();
  // A rank that has left may have done its part before.
  const auto wait_ns =
      !waits ? 0 : std::max(wait->at.since_ns, wait->is_certain() ? 0 : wait->left_ns);
  const auto since_ns = std::max(wait_ns, awake_.since_ns());
  auto failure = find_cause(*state_, waits ? Reason::kWaits : Reason::kWatches, since_ns, wait);
  if (!failure) {
    failure = find_uneven_forwards(peers(), page().view());
  }
  if (!failure) {
    failure = find_uneven_settings(peers(), page().view(), awake_.since_ns());
  }
  return failure ? failure : recorded_.check(now_ns());
}

void Monitor::await_lease() {
  if (!state_->has_lease()) {
    return;
  }
  const auto& table = *state_->table();
  constexpr auto kEnded = static_cast<uint32_t>(StoreState::kEnded);
  const auto start = now_ns();
  while (now_ns() - table.renewed_ns > state_->group.lease_ns || table.store_state == kEnded) {
    if (table.store_may_end) {
      return;
    }
    if (auto failure = find_cause(*state_, Reason::kHasNoLease, start)) {
      declare(*failure);
    }
    raise_if_failed();
    std::this_thread::sleep_for(std::chrono::nanoseconds(times::kFailurePoll));
  }
}

void Monitor::explain_error(const std::string& said) {
  if (!is_forked()) {
    find_cause_of_error(said);
    raise_if_failed(said);
  }
}

void Monitor::find_cause_of_error(const std::string& said) {
  const auto own = state_->activity();
  const auto waited_ns = awake_.lasted_ns(own.since_ns, now_ns());
  const bool in_step = may_wait(own.doing);
  const bool timed_out = in_step && waited_ns >= times::kLeastTimeout && says_timeout(said);
  const auto& search = timed_out ? times::kAfterTimeout
                       : in_step ? times::kConnectionLost
                                 : times::kOutsideStep;
  // The ranks that are missing at the time of the error. They may arrive during the search.
  Wait wait{.at = own};
  wait.missing = timed_out ? peers().missing(own) : std::vector<int>();
  auto& channel = *state_->channel;
  channel.introduce();
  state_->want_states();
  channel.check(awake_.since_ns());
  AwakeTime awake;  // a rank that was stopped has not read the messages of other ranks
  int64_t end_ns = INT64_MAX;
  while (!failed()) {
    state_->meet();
    state_->want_states();
    const auto now = now_ns();
    awake.update(now);
    const auto start = awake.since_ns();
    const auto lasted = now - start;
    const auto store = channel.store_state();
    const bool awaits_store = store == StoreState::kSlow && lasted < times::kSlowStore;
    // If there are many hosts or ranks, the keeper reads their states less often.
    const auto* table = state_->table();
    const int64_t read = table != nullptr ? table->between_reads_ns.load() : 0;
    const bool all_had_time = lasted > times::kAllHadTime + read && !awaits_store;
    // Ranks that are silent or unknown when a wait is given up may only be late.
    const auto reason = all_had_time && !timed_out ? Reason::kAllHadTime : Reason::kCallFailed;
    if (auto failure = find_cause(*state_, reason, start)) {
      declare(*failure);
      return;
    }
    if (store == StoreState::kEnded) {  // no message of another host can arrive
      end_ns = std::min(end_ns, now + times::kEndedStore);
    }
    const bool awaits_unknown = awaits_store && find_unknown(peers(), /*store_answers=*/true);
    const auto limit =
        peers().any_remote() ? search.between_hosts + 2 * read : search.on_one_host + read;
    if (now > end_ns || (lasted > limit && !awaits_unknown)) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(times::kFailurePoll));
  }
  if (failed()) {
    return;
  }
  const auto last_reason = timed_out ? Reason::kWaits : Reason::kSearchIsOver;
  auto failure = find_cause(*state_, last_reason, awake.since_ns());
  if (!failure && timed_out) {
    if (peers().any_remote()) {  // other hosts have written their states meanwhile
      wait.missing = peers().missing(own);
    }
    failure = stalls_.find_stall(wait, waited_ns);
  }
  if (failure) {
    declare(*failure);
  }
}

}  // namespace ddpx::health
