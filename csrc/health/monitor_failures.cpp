// How a monitor finds out that its group cannot go on, and why.
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
// ended the process; ranks of other machines have to be asked through the store.
constexpr auto kTimeToSee = milliseconds(500);
constexpr auto kTimeToSeeFar = milliseconds(3000);
constexpr auto kTimeForStore = milliseconds(3500);  // if its answers stay late
constexpr auto kBetweenLooks = milliseconds(10);

// Between two turns (see Turn).
constexpr auto kTurn = milliseconds(300);
constexpr auto kTurnFar = milliseconds(1000);  // ranks of other machines look twice a second

constexpr int64_t kOutwaitedNs = 1'000'000'000;  // less is no wait for a peer that does not come

// Who waits that long, without an error, looks whether the store has ended, if that is silent.
constexpr auto kLongWait = milliseconds(2000);

// A rank that has left is no loss to one that waits for a moment only: it may have done its part.
constexpr auto kLeftMatters = milliseconds(300);

constexpr auto kTimeToRead = milliseconds(100);  // what another one writes

constexpr std::size_t kMostHow = 7000;  // characters of a mismatch; a page has room for more

// As gloo, NCCL and shm say it: "Timed out waiting 1800000ms for recv operation to complete".
bool says_timeout(const std::string& error) {
  return error.find("imed out") != std::string::npos || error.find("imeout") != std::string::npos;
}

// The group's timeout ends one rank's wait and breaks the connections to all others. So ranks give
// up one after the other, and the later ones hear what the earlier ones have to say.
enum class Turn {
  kOutwaited = -1,  // waited in a step for the whole timeout: it knows for whom
  kOwnCall = 0,     // in a call of the script's own
  kSawBreak = 1,    // in a step, and saw nothing but the break
};

Turn turn_of(const Activity& own, int64_t waited_ns, const std::string& said) {
  if (!may_wait(own.doing)) {
    return Turn::kOwnCall;
  }
  const bool outwaited = waited_ns >= kOutwaitedNs && says_timeout(said);
  return outwaited ? Turn::kOutwaited : Turn::kSawBreak;
}

// How long a rank looks for the cause of an error.
struct TimeToLook {
  milliseconds until_silence_counts;
  milliseconds until_error_stands;
};

TimeToLook time_to_look(Turn turn, bool any_far) {
  const int place = static_cast<int>(turn);
  const auto near = kTimeToSee + place * kTurn;
  return {std::min(near, kTimeToSee), any_far ? kTimeToSeeFar + place * kTurnFar : near};
}

// When the store's process has ended, ranks of other machines can tell nothing any more; those of
// this one have soon told what they heard before. A connection that broke is no such end.
class StoreEnd {
 public:
  bool is_past(Courier& courier, int64_t now) {
    constexpr auto kTimeToTell = std::chrono::nanoseconds(kTimeToSee).count();
    if (courier.broken() && now >= next_look_ns_) {
      courier.look_for_server();
      next_look_ns_ = now + kTimeToTell;
    }
    if (courier.server_ended() && seen_ns_ == 0) {
      seen_ns_ = now;
    }
    return seen_ns_ != 0 && now - seen_ns_ > kTimeToTell;
  }

 private:
  int64_t next_look_ns_ = 0;
  int64_t seen_ns_ = 0;
};

}  // namespace

void Monitor::raise_if_failed(const std::string& said) {
  if (!failed()) {
    return;
  }
  auto found = report();
  found->said = said;
  const auto& failure = found->failure;
  const std::string name = error_name(failure.kind);
  if (failure.casualties.empty()) {
    page_.fail(name + ": " + failure.how, std::nullopt);
  } else {
    const bool stalled = failure.kind == FailureKind::kStalled;
    page_.fail(
        name + (stalled ? ": it gave up waiting for rank " : ": it lost rank ") +
            std::to_string(failure.first_rank()),
        failure.first_rank());
  }
  raise(*found);
}

void Monitor::raise_mismatch(const std::string& how) {
  Failure own{FailureKind::kMismatch, {}, how.substr(0, cut_utf8(how, kMostHow))};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      page_.propose(own.to_text());
    }
  }
  // Ranks may find it at the same moment, each in its own words: those of one of them count.
  const int elected = roster_.elect(page_.view());
  std::optional<Failure> theirs;
  const auto deadline = std::chrono::steady_clock::now() + kTimeToRead;
  while (elected != group_.rank && !theirs && std::chrono::steady_clock::now() < deadline) {
    theirs = roster_.proposal_of(elected);
    std::this_thread::sleep_for(milliseconds(theirs ? 0 : 1));
  }
  declare(theirs ? std::move(*theirs) : std::move(own));
  raise_if_failed();
  throw std::logic_error("a failure that was declared was not raised");
}

std::optional<Failure> Monitor::find_failure(bool also_left) const {
  if (auto declared = roster_.find_declared()) {
    return declared;
  }
  auto dead = roster_.find_dead(also_left);
  // Who ends because of what it has declared may have done both since.
  auto declared = dead ? roster_.find_declared() : std::nullopt;
  return declared ? declared : dead;
}

// Of a job that was told to end, ranks end one after the other, and none is to blame.
bool Monitor::was_told() const {
  return page_.view().presence() == Presence::kTold;
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
      roster_.rank_names()};
  if (own.doing == Doing::kWaiting || own.doing == Doing::kHook) {
    found.bucket = own.bucket;
    found.params = roster_.names().params(own.model, own.bucket);
  }
  return found;
}

void Monitor::declare(Failure failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      return;
    }
    failure_ = failure;
    page_.declare(failure.to_text());
    failed_.store(true, std::memory_order_release);
  }
  declared_.notify_all();
  log(Level::kError, "rank_failed", failure.describe(roster_.rank_names()), failure.first_rank());
  courier_->post_failure(failure.to_text());
  group_.abort();
}

void Monitor::explain_error(const std::string& said) {
  const auto own = page_.view().activity();
  const auto waited_before = now_ns() - std::max<int64_t>(own.since_ns, awake_ns_);
  const auto turn = turn_of(own, waited_before, said);
  // As it was when the error came: who is late may come now.
  auto missing =
      turn == Turn::kOutwaited ? roster_.missing(own, page_.view().progress()) : std::vector<int>();
  const bool any_far = !roster_.far_ranks().empty();
  const auto time = time_to_look(turn, any_far);
  curious_ = true;
  courier_->hurry();
  StoreEnd store_end;
  auto start = now_ns();
  auto last = start;
  while (true) {
    raise_if_failed(said);
    const auto now = now_ns();
    if (now - std::exchange(last, now) > kStoppedNs) {
      start = now;  // others may have told meanwhile what this one has not heard yet
    }
    const auto looked = std::chrono::nanoseconds(now - start);
    const auto store = courier_->store_state();
    const bool slow = store == StoreState::kLate || store == StoreState::kOverdue;
    const bool awaits_store = slow && looked < kTimeForStore;
    const bool silence_counts = looked > time.until_silence_counts && !awaits_store;
    if (auto failure = find_cause(start, silence_counts)) {
      declare(std::move(*failure));
      continue;
    }
    if (looked > time.until_error_stands && !(awaits_store && any_unknown())) {
      break;
    }
    if (any_far && store_end.is_past(*courier_, now)) {
      break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    declared_.wait_for(lock, kBetweenLooks, [this] { return failure_.has_value(); });
  }
  auto failure = any_far ? find_store_lost() : std::nullopt;
  if (!failure && turn == Turn::kOutwaited) {
    if (any_far) {  // nothing new was known of them before this one asked
      missing = roster_.missing(own, page_.view().progress());
    }
    failure = find_stall(own, waited_before, std::move(missing));
  }
  if (failure) {
    declare(std::move(*failure));
    raise_if_failed(said);
  }
  curious_ = false;
}

// Of an error that came at `start_ns`. Silence counts once all have had time to tell what they
// know.
std::optional<Failure> Monitor::find_cause(int64_t start_ns, bool silence_counts) const {
  auto failure = find_failure(/*also_left=*/!was_told());
  if (failure || !silence_counts) {
    return failure;
  }
  const auto store = courier_->store_state();
  if (store == StoreState::kLost) {
    return roster_.find_unknown(/*store_answers=*/false);
  }
  // Through a slow store beats come late.
  failure = store == StoreState::kAnswers ? roster_.find_silent(start_ns) : std::nullopt;
  return failure ? failure : roster_.find_unknown(/*store_answers=*/true);
}

bool Monitor::any_unknown() const {
  return roster_.find_unknown(/*store_answers=*/true).has_value();
}

// After an error that nothing else explains.
std::optional<Failure> Monitor::find_store_lost() const {
  const auto first = group_.rank != 0 ? roster_.peer(0) : nullptr;
  if (!first || first->local() || courier_->store_state() != StoreState::kLost) {
    return std::nullopt;
  }
  const auto& who = first->introduction();
  return Failure{
      FailureKind::kDead,
      {{0, who.host, who.process.pid, "or the launcher died: the store is gone", {}, {}}},
      {}};
}

// Before rank 0, which may have hosted it, has introduced itself: others that have seen its end may
// have no way to tell this one. A store that is slow, or stopped, is no failure.
std::optional<Failure> Monitor::find_store_ended_early() {
  if (group_.rank == 0 || roster_.peer(0) || courier_->store_state() != StoreState::kLost) {
    return std::nullopt;
  }
  if (!courier_->server_ended()) {
    courier_->look_for_server();
    return std::nullopt;
  }
  auto failure = roster_.find_unknown(/*store_answers=*/false);
  return failure && failure->first_rank() == 0 ? failure : std::nullopt;
}

void Monitor::look_for_failures() {
  auto failure = find_failure(/*also_left=*/false);
  const auto own = page_.view().activity();
  const auto waited =
      std::chrono::nanoseconds(!was_told() && waits_for_peers(own.doing) ? waited_ns(own) : 0);
  if (!failure && waited > kLeftMatters) {
    failure = roster_.find_dead(/*also_left=*/true);
    const auto missing = roster_.missing(own, page_.view().progress());
    const auto did_its_part = [&missing](const Casualty& casualty) {
      return std::find(missing.begin(), missing.end(), casualty.rank) == missing.end();
    };
    if (failure && std::erase_if(failure->casualties, did_its_part) > 0 &&
        failure->casualties.empty()) {
      failure.reset();
    }
  }
  if (!failure && waited > kLongWait) {
    failure = find_store_ended_early();
  }
  if (failure) {
    declare(std::move(*failure));
  }
}

}  // namespace ddpx::health
