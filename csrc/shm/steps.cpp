#include "steps.h"

#include <sched.h>

#include <cstdio>
#include <new>

#include "call.h"
#include "error.h"

namespace ddpx::shm {
namespace {

// How long a sleeper may miss that a peer died or that the time is up.
constexpr auto kSlice = std::chrono::milliseconds(100);

}  // namespace

Steps::Steps(Peers& peers, Patience patience)
    : peers_(peers), counter_(peers.board().steps), patience_(patience) {}

void Steps::arrive() {
  peers_.own_home().core.store(sched_getcpu(), std::memory_order_relaxed);
  awaited_ += static_cast<uint32_t>(peers_.size());
  // Sequentially consistent, as in `await`: either this rank sees the sleeper, or the sleeper sees
  // the arrival. The chain of increments passes on what earlier ranks released.
  const auto count = counter_.count.fetch_add(1) + 1;
  if (count == awaited_ && counter_.sleepers.load() > 0) {
    futex_wake_all(counter_.count);
  }
  // After the arrival: who dies in between is not taken for someone who arrived.
  peers_.own_home().steps.store(++own_steps_, std::memory_order_release);
}

bool Steps::complete() const {
  return static_cast<int32_t>(counter_.count.load() - awaited_) >= 0;
}

// Whether a rank that is waited for was last seen on the core of this thread.
bool Steps::keeps_peer_from_running() const {
  const auto core = peers_.own_home().core.load(std::memory_order_relaxed);
  for (int index = 0; index < peers_.size(); ++index) {
    if (index != peers_.own_index() && !has_arrived(index) &&
        peers_.home(index).core.load(std::memory_order_relaxed) == core) {
      return true;
    }
  }
  return false;
}

bool Steps::has_arrived(int index) const {
  const auto steps = peers_.home(index).steps.load(std::memory_order_acquire);
  return static_cast<int32_t>(steps - own_steps_) >= 0;
}

bool Steps::look_briefly() const {
  if (complete()) {
    return true;
  }
  if (patience_.spin.count() > 0 && !keeps_peer_from_running()) {
    const auto end = Clock::now() + patience_.spin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (complete()) {
          return true;
        }
        relax();
      }
    } while (Clock::now() < end);
  }
  for (int i = 0; i < patience_.yields; ++i) {
    sched_yield();
    if (complete()) {
      return true;
    }
  }
  return false;
}

void Steps::await(const Waiting& waiting) {
  if (look_briefly()) {
    return;
  }
  auto next_check = Clock::now() + kSlice;
  while (true) {
    counter_.sleepers.fetch_add(1);
    const auto seen = counter_.count.load();
    const bool done = static_cast<int32_t>(seen - awaited_) >= 0;
    // A failure that came before does not wake anyone any more.
    if (!done && !given_up_.load() && !has_failed(peers_.board().failure)) {
      futex_wait(counter_.count, seen, kSlice);
    }
    counter_.sleepers.fetch_sub(1);
    if (complete()) {
      return;
    }
    if (given_up_.load() || has_failed(peers_.board().failure) || Clock::now() >= next_check) {
      check_on_peers(waiting);
      next_check = Clock::now() + kSlice;
    }
  }
}

void Steps::check_on_peers(const Waiting& waiting) {
  check(waiting.descriptor);
  const auto phase = describe(waiting.descriptor);
  std::vector<int> missing;
  for (int index = 0; index < peers_.size(); ++index) {
    if (has_arrived(index)) {
      continue;
    }
    // Only those who have not arrived: what a rank did before it died still counts.
    if (const auto loss = peers_.loss_of(index)) {
      if (complete()) {
        return;
      }
      throw fail(
          {ErrorKind::kPeerLost,
           list_ranks({peers_.rank_of(index)}) + " " + *loss + " while others waited for it in " +
               phase + ". See that rank's output; the group cannot go on, start the job again.",
           peers_.rank_of(index)},
          phase);
    }
    missing.push_back(peers_.rank_of(index));
  }
  if (Clock::now() < waiting.deadline || complete()) {
    return;
  }
  throw fail(
      {ErrorKind::kTimeout,
       phase + " timed out after " + std::to_string(waiting.timeout.count()) +
           " ms: " + list_ranks(missing) +
           " did not arrive. They are slower, stuck, or called fewer operations; if slower, raise "
           "the timeout.",
       missing.empty() ? -1 : missing.front()},
      phase);
}

Error Steps::error_of(const Failure& failure, const std::string& phase) const {
  std::vector<int> culprits;
  if (failure.culprit >= 0) {
    culprits.push_back(failure.culprit);
  }
  return Error(
      failure.kind,
      opening(peers_.rank_of(peers_.own_index()), phase) + failure.text,
      std::move(culprits));
}

Error Steps::fail(const Failure& failure, const std::string& phase) {
  const auto standing = record_failure(peers_.board().failure, failure);
  futex_wake_all(counter_.count);
  return error_of(standing, phase);
}

std::exception_ptr Steps::fail_with_current_exception(const char* phase) noexcept {
  const int rank = peers_.rank_of(peers_.own_index());
  char text[sizeof(FailureRecord::text)];
  auto kind = ErrorKind::kSystem;
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    kind = ErrorKind::kOutOfMemory;
    std::snprintf(
        text,
        sizeof(text),
        "rank %d: no memory was left in %s (%s). See the memory limits of its process and host; "
        "the "
        "group cannot go on, start the job again.",
        rank,
        phase,
        error.what());
  } catch (const std::exception& error) {
    std::snprintf(text, sizeof(text), "rank %d: %s failed: %s", rank, phase, error.what());
  } catch (...) {
    std::snprintf(text, sizeof(text), "rank %d: %s failed with an unknown exception", rank, phase);
  }
  record_failure(peers_.board().failure, kind, text, rank);
  futex_wake_all(counter_.count);
  try {
    return std::make_exception_ptr(*failure(phase));
  } catch (...) {
    return std::current_exception();
  }
}

std::optional<Error> Steps::failure(const std::string& phase) const {
  const auto failure = read_failure(peers_.board().failure);
  return failure ? std::optional<Error>(error_of(*failure, phase)) : std::nullopt;
}

void Steps::check(const Descriptor& current) const {
  // What it is at is described only once there is something to say: this runs in every operation.
  if (const auto failure = read_failure(peers_.board().failure)) {
    throw error_of(*failure, describe(current));
  }
  if (given_up_.load()) {
    throw error_of(
        {ErrorKind::kAborted, "the process group of this rank was destroyed meanwhile"},
        describe(current));
  }
}

void Steps::give_up() {
  given_up_.store(true);
  futex_wake_all(counter_.count);
}

}  // namespace ddpx::shm
