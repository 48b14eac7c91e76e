// How a monitor finds out that its group cannot continue, and why.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "monitor.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

// After an error in a collective call: gloo may see the end of a connection before the kernel has
// ended the process. Ranks of other hosts have to be asked through the store.
constexpr auto kTimeToSee = milliseconds(500);
constexpr auto kTimeToSeeRemote = milliseconds(3500);
constexpr auto kTimeForStore = milliseconds(3500);  // if its answers stay late
constexpr auto kBetweenLooks = milliseconds(10);

// The group's timeout ends one rank's wait, and breaks the connections of the others. Ranks that
// know more report first: each turn looks for the cause for this much longer.
constexpr auto kTurn = milliseconds(300);
constexpr auto kTurnRemote = milliseconds(1000);

constexpr int64_t kOutwaitedNs = 1'000'000'000;    // the least wait that a timeout can end
constexpr auto kStoreMatters = milliseconds(500);  // the least wait that a lost store fails
constexpr auto kLeftMatters = milliseconds(300);   // the same for a rank that has left
constexpr int64_t kWantedNs = 1'000'000'000;

constexpr std::size_t kMostHow = 7000;  // characters of a mismatch; a page has room for more

// gloo, NCCL and shm say "Timed out waiting 1800000ms for recv operation to complete".
bool says_timeout(const std::string& error) {
  return error.find("imed out") != std::string::npos || error.find("imeout") != std::string::npos;
}

}  // namespace

void Monitor::raise_if_failed(const std::string& said) {
  if (!failed()) {
    return;
  }
  auto found = report();
  found->said = said;
  const auto& failure = found->failure;
  const std::string name = error_name(failure.kind);
  if (failure.lost.empty()) {
    page_.fail(name + ": " + failure.how, /*blames_peer=*/false);
  } else {
    const bool stalled = failure.kind == FailureKind::kStalled;
    page_.fail(
        name + (stalled ? ": it gave up waiting for rank " : ": it lost rank ") +
            std::to_string(failure.first_rank()),
        /*blames_peer=*/true);
  }
  raise(*found);
}

void Monitor::raise_mismatch(const std::string& how) {
  declare({FailureKind::kMismatch, {}, how.substr(0, cut_utf8(how, kMostHow))});
  raise_if_failed();
  throw std::logic_error("a failure that was declared was not raised");
}

std::optional<Failure> Monitor::find_declared() const {
  const auto* table = threads_->table();
  const auto text = table == nullptr ? std::nullopt : table->declared();
  return text ? Failure::from_text(*text) : std::nullopt;
}

std::optional<Failure> Monitor::find_failure(bool also_left) const {
  if (auto declared = find_declared()) {
    return declared;
  }
  auto dead = peers_.find_dead(also_left);
  // A rank may have declared a failure and ended because of it since.
  auto declared = dead ? find_declared() : std::nullopt;
  return declared ? declared : dead;
}

// The ranks of a job that got SIGTERM end one after the other, and no rank is to blame.
bool Monitor::is_terminated() const {
  return page_.view().presence() == Presence::kTerminated;
}

std::optional<RankReport> Monitor::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) {
    return std::nullopt;
  }
  const auto own = page_.view().activity();
  RankReport found{
      *failure_,
      group_.rank,
      own.training_step(),
      own.doing,
      std::nullopt,
      {},
      {},
      peers_.rank_names(),
      group_.survivors_live_on && !has_lease_,
      {}};
  if (found.is_about_this_rank()) {
    found.own_stack = page_.view().stack.read();
  }
  if (own.doing == Doing::kWaiting || own.doing == Doing::kHook) {
    found.bucket = own.bucket;
    found.params = peers_.names().params(own.model, own.bucket);
  }
  return found;
}

void Monitor::declare(Failure failure) {
  auto* table = threads_->table();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      return;
    }
    if (table != nullptr) {
      const auto standing = table->declare(group_.rank, failure.to_text(), now_ns());
      failure = Failure::from_text(standing).value_or(failure);
    }
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
  }
  declared_.notify_all();
  auto message = failure.describe(peers_.rank_names());
  std::replace(message.begin(), message.end(), '\n', ' ');
  // No warning: each rank prints its report once, when it raises, or at SIGTERM.
  log(Level::kInfo, "rank_failed", message, failure.first_rank());
  if (report()->is_about_this_rank()) {
    log(Level::kInfo, "stack_wanted", {}, group_.rank);  // for its report
  }
  if (table == nullptr) {
    threads_->post_failure(failure.to_text());  // once the store answers
  }
  threads_->look(awake_ns_);  // the keeper posts it
  group_.abort();
}

void Monitor::want_states() {
  if (auto* table = threads_->table()) {
    table->wanted_until_ns = now_ns() + kWantedNs;
  }
}

void Monitor::explain_error(const std::string& said) {
  const auto own = page_.view().activity();
  const auto waited = now_ns() - std::max<int64_t>(own.since_ns, awake_ns_);
  const bool timed_out = may_wait(own.doing) && waited >= kOutwaitedNs && says_timeout(said);
  // A rank that timed out in a step knows for whom it waited. A rank that only lost a connection in
  // a step comes last.
  const int turn = !may_wait(own.doing) ? 0 : timed_out ? -1 : 1;
  const auto near_limit = kTimeToSee + turn * kTurn;
  const auto remote_limit = kTimeToSeeRemote + turn * kTurnRemote;
  // The ranks that are missing when the error comes. They may come during the search for the cause.
  auto missing = timed_out ? peers_.missing(own) : std::vector<int>();
  threads_->introduce();
  want_states();
  threads_->look(awake_ns_);
  auto start = now_ns();
  auto last = start;
  int64_t store_ended_ns = 0;
  while (true) {
    raise_if_failed(said);
    meet();
    want_states();
    const auto now = now_ns();
    if (now - std::exchange(last, now) > kStoppedNs) {
      start = now;  // other ranks may have written what this one has not read yet
    }
    const auto looked = std::chrono::nanoseconds(now - start);
    const auto store = threads_->store_state();
    const bool slow = store == StoreState::kSlow;
    const bool awaits_store = slow && looked < kTimeForStore;
    const bool silence_counts = looked > std::min(near_limit, kTimeToSee) && !awaits_store;
    if (auto failure = find_cause(start, silence_counts)) {
      declare(std::move(*failure));
      continue;
    }
    store_ended_ns = store != StoreState::kEnded ? 0 : store_ended_ns == 0 ? now : store_ended_ns;
    // Without the store, ranks of other hosts can write nothing more.
    const bool store_is_over =
        store_ended_ns != 0 && std::chrono::nanoseconds(now - store_ended_ns) > kTimeToSee;
    const bool awaits_unknown = awaits_store && peers_.find_unknown(/*store_answers=*/true);
    const auto limit = peers_.any_remote() ? remote_limit : near_limit;
    if (store_is_over || (looked > limit && !awaits_unknown)) {
      break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    declared_.wait_for(lock, kBetweenLooks, [this] { return failure_.has_value(); });
  }
  const auto first = peers_.peer(0);
  auto failure = first && !first->local() ? find_store_lost(StoreState::kLost) : std::nullopt;
  if (!failure && timed_out) {
    if (peers_.any_remote()) {  // states of other hosts are known only now
      missing = peers_.missing(own);
    }
    failure = find_stall(own, waited, missing);
  }
  if (failure) {
    declare(std::move(*failure));
    raise_if_failed(said);
  }
}

// The cause of an error that came at `start_ns`. Silence counts after all ranks have had time to
// write what they know.
std::optional<Failure> Monitor::find_cause(int64_t start_ns, bool silence_counts) const {
  auto failure = find_failure(/*also_left=*/!is_terminated());
  if (failure || !silence_counts) {
    return failure;
  }
  const auto store = threads_->store_state();
  const auto* table = threads_->table();
  if (store == StoreState::kAnswers && table != nullptr) {  // messages are late in a slow store
    failure = peers_.find_silent(start_ns, table->read_ns);
  }
  return failure ? failure : peers_.find_unknown(/*store_answers=*/store < StoreState::kLost);
}

// Without the store, ranks cannot hear of failures of other hosts. Before all ranks are known, this
// matters only if rank 0 is not known, and a store that is slow or stopped is no failure.
std::optional<Failure> Monitor::find_store_lost(StoreState least) const {
  const auto state = threads_->store_state();
  const auto* table = threads_->table();
  const auto stage = table == nullptr ? HostTable::Stage::kGathering : table->stage.load();
  if (state < least || stage == HostTable::Stage::kOneHost ||
      (table != nullptr && table->store_may_end)) {
    return std::nullopt;
  }
  if (stage == HostTable::Stage::kManyHosts) {
    return peers_.store_lost(state != StoreState::kEnded);
  }
  const bool first_is_unknown = group_.rank != 0 && !peers_.peer(0);
  return first_is_unknown && state == StoreState::kEnded
             ? peers_.find_unknown(/*store_answers=*/false)
             : std::nullopt;
}

void Monitor::await_lease_of_host() {
  const auto& table = *threads_->table();
  constexpr auto kEnded = static_cast<uint32_t>(StoreState::kEnded);
  const auto start = now_ns();
  for (auto now = start; now - table.renewed_ns > group_.lease_ns || table.store_state == kEnded;
       now = now_ns()) {
    if (table.store_may_end) {
      return;
    }
    auto failure = find_declared();
    if (!failure) {
      failure = find_store_lost(StoreState::kEnded);
    }
    if (!failure && now - start > group_.lease_ns / 3 * 2) {
      failure = peers_.store_lost(/*silent=*/true);
    }
    if (failure) {
      declare(std::move(*failure));
    }
    raise_if_failed();
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void Monitor::look_for_failures() {
  auto failure = find_failure(/*also_left=*/false);
  const auto own = page_.view().activity();
  const auto waited =
      std::chrono::nanoseconds(!is_terminated() && waits_for_peers(own.doing) ? waited_ns(own) : 0);
  if (!failure && waited > kLeftMatters) {
    failure = peers_.find_dead(/*also_left=*/true);
    // A rank that has left may have done its part before.
    const auto missing = peers_.missing(own);
    if (failure && std::none_of(failure->lost.begin(), failure->lost.end(), [&](auto& each) {
          return std::count(missing.begin(), missing.end(), each.rank) > 0;
        })) {
      failure.reset();
    }
  }
  if (!failure && waited > kStoreMatters) {
    failure = find_store_lost(StoreState::kSilent);
  }
  if (failure) {
    declare(std::move(*failure));
  }
}

}  // namespace ddpx::health
