#include "steps.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <new>

#include "call.h"
#include "error.h"

namespace ddpx::shm {
namespace {

// Poll interval for dead peers and for the deadline while a rank sleeps.
constexpr auto kDeathPoll = std::chrono::milliseconds(100);

}  // namespace

Steps::Steps(Peers& peers, SpinPolicy spin_policy)
    : peers_(peers), counter_(peers.shared_state().steps), spin_policy_(spin_policy) {}

void Steps::arrive() {
  if (spin_policy_.spin.count() > 0) {
    const int core = sched_getcpu();
    peers_.own_home().core.store(core, std::memory_order_relaxed);
    auto& arrived = peers_.shared_state().arrived_on_core[static_cast<unsigned>(core) % kCores];
    previous_on_core_ = arrived.exchange(peers_.own_index() + 1, std::memory_order_relaxed) - 1;
  }
  complete_count_ += static_cast<uint32_t>(peers_.size());
  // Both operations are sequentially consistent, as in `await`: either this rank sees the sleeper,
  // or the sleeper sees the arrival. The increments form one release sequence, so that an acquire
  // of the complete count acquires the data of all ranks.
  const auto count = counter_.count.fetch_add(1) + 1;
  if (count == complete_count_ && counter_.sleepers.load() > 0) {
    os::futex_wake_all(counter_.count);
  }
  // Must come after the increment: a rank that dies between the two has not arrived by `steps`,
  // and peers report its death unless the step is complete.
  peers_.own_home().steps.store(++own_steps_, std::memory_order_release);
}

bool Steps::complete() const {
  return static_cast<int32_t>(counter_.count.load() - complete_count_) >= 0;
}

// An awaited rank that last ran on this core may need the core: spinning would delay it.
bool Steps::awaited_rank_was_on_this_core() const {
  const int other = previous_on_core_;
  return other >= 0 && other < peers_.size() && !has_arrived(other) &&
         peers_.home(other).core.load(std::memory_order_relaxed) ==
             peers_.own_home().core.load(std::memory_order_relaxed);
}

bool Steps::has_arrived(int index) const {
  const auto steps = peers_.home(index).steps.load(std::memory_order_acquire);
  return static_cast<int32_t>(steps - own_steps_) >= 0;
}

bool Steps::spin() const {
  if (complete()) {
    return true;
  }
  if (spin_policy_.spin.count() > 0 && !awaited_rank_was_on_this_core()) {
    const auto end = Clock::now() + spin_policy_.spin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (complete()) {
          return true;
        }
        cpu_relax();
      }
    } while (Clock::now() < end);
  }
  for (int i = 0; i < spin_policy_.yields; ++i) {
    sched_yield();
    if (complete()) {
      return true;
    }
  }
  return false;
}

// Whether the peers must be checked before this rank sleeps again.
bool Steps::interrupted() const {
  return cancelled_.load() || has_failed(peers_.shared_state().failure) ||
         counter_.num_left.load() != checked_left_;
}

void Steps::await(const WaitContext& context) {
  if (spin()) {
    return;
  }
  auto next_check = Clock::now() + kDeathPoll;
  while (true) {
    counter_.sleepers.fetch_add(1);
    const auto seen = counter_.count.load();
    const bool done = static_cast<int32_t>(seen - complete_count_) >= 0;
    // An interruption wakes only ranks that sleep already, so it is checked before each sleep.
    if (!done && !interrupted()) {
      os::futex_wait(counter_.count, seen, kDeathPoll);
    }
    counter_.sleepers.fetch_sub(1);
    if (complete()) {
      return;
    }
    if (interrupted() || Clock::now() >= next_check) {
      checked_left_ = counter_.num_left.load();
      check_peers(context);
      next_check = Clock::now() + kDeathPoll;
    }
  }
}

// The local ranks that have not arrived.
std::vector<int> Steps::missing() const {
  std::vector<int> missing;
  for (int index = 0; index < peers_.size(); ++index) {
    if (!has_arrived(index)) {
      missing.push_back(index);
    }
  }
  return missing;
}

// Only ranks that have not arrived are checked: the work of a rank before its death counts. A rank
// makes system calls for one of them at a time. Waiting ranks begin with different ones, and each
// goes on to the next one in its next check.
void Steps::check_peers(const WaitContext& context) {
  check(context.descriptor);
  const auto missing = this->missing();
  if (missing.empty() || complete()) {
    return;
  }
  const auto phase = describe(context.descriptor);
  const auto left = std::find_if(
      missing.begin(), missing.end(), [this](int index) { return peers_.has_left(index); });
  const auto next = static_cast<std::size_t>(peers_.own_index()) + num_checks_++;
  const int index = left != missing.end() ? *left : missing[next % missing.size()];
  if (const auto loss = peers_.loss_of(index)) {
    if (complete()) {
      return;
    }
    throw fail(
        {ErrorKind::kPeerLost,
         peers_.name_of(index) + " " + *loss + " while other ranks waited for it in " + phase +
             ". See the output of that rank. The group cannot continue: restart the job.",
         peers_.rank_of(index)},
        phase);
  }
  if (Clock::now() < context.deadline || complete()) {
    return;
  }
  std::vector<int> ranks;
  for (const int late : missing) {
    ranks.push_back(peers_.rank_of(late));
  }
  throw fail(
      {ErrorKind::kTimeout,
       phase + " timed out after " + std::to_string(context.timeout.count()) +
           " ms: " + peers_.topology().name(ranks) + " did not arrive. " +
           (ranks.size() == 1 ? "This rank is" : "These ranks are") +
           " slower, stuck, or called fewer operations. If slower, raise the timeout.",
       ranks.front()},
      phase);
}

Error Steps::error_of(const Failure& failure, const std::string& phase) const {
  return Error(
      failure.kind,
      opening(peers_.name_of(peers_.own_index()), phase) + failure.text,
      failure.culprit);
}

Error Steps::fail(const Failure& failure, const std::string& phase) {
  const auto first = record_failure(peers_.shared_state().failure, failure);
  os::futex_wake_all(counter_.count);
  return error_of(first, phase);
}

std::exception_ptr Steps::fail_with_current_exception(const char* phase) noexcept {
  const int rank = peers_.rank_of(peers_.own_index());
  const int in_job = peers_.topology().rank_in_job(rank);
  char name[64];  // the text of Peers::name_of(); snprintf allocates no memory
  std::snprintf(
      name,
      sizeof(name),
      in_job == rank ? "rank %d" : "rank %d (rank %d of the job)",
      rank,
      in_job);
  char text[sizeof(FailureRecord::text)];
  auto kind = ErrorKind::kSystem;
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    kind = ErrorKind::kOutOfMemory;
    std::snprintf(
        text,
        sizeof(text),
        "%s: no memory was left in %s (%s). Check the memory limits of its process and host. "
        "The group cannot continue: restart the job.",
        name,
        phase,
        error.what());
  } catch (const std::exception& error) {
    std::snprintf(text, sizeof(text), "%s: %s failed: %s", name, phase, error.what());
  } catch (...) {
    std::snprintf(text, sizeof(text), "%s: %s failed with an unknown exception", name, phase);
  }
  record_failure(peers_.shared_state().failure, kind, text, rank);
  os::futex_wake_all(counter_.count);
  try {
    return std::make_exception_ptr(failure(phase).value());
  } catch (...) {
    return std::current_exception();
  }
}

std::optional<Error> Steps::failure(const std::string& phase) const {
  const auto failure = read_failure(peers_.shared_state().failure);
  return failure ? std::optional<Error>(error_of(*failure, phase)) : std::nullopt;
}

void Steps::check(const Descriptor& current) const {
  // This runs in every operation, so `current` is described only if there is an error.
  if (const auto failure = read_failure(peers_.shared_state().failure)) {
    throw error_of(*failure, describe(current));
  }
  if (cancelled_.load()) {
    throw error_of(
        {ErrorKind::kAborted, "the process group of this rank was destroyed during the operation"},
        describe(current));
  }
}

void Steps::cancel() {
  cancelled_.store(true);
  os::futex_wake_all(counter_.count);
}

}  // namespace ddpx::shm
