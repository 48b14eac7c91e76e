#include "monitor.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "sentry.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// After an error in a collective call: gloo may see the end of a connection before the kernel has
// ended the process; ranks of other machines have to be asked through the store.
constexpr auto kTimeToSee = milliseconds(500);
constexpr auto kTimeToSeeFar = milliseconds(3000);
constexpr auto kStoreLost = milliseconds(2000);  // of that time without an answer
constexpr auto kBetweenLooks = milliseconds(10);

// Who waits that long, without an error, for a store that is silent looks whether it has ended.
constexpr auto kLongSilence = milliseconds(2000);

// A rank that has left is no loss to one that waits for a moment only: it may have done its part.
constexpr auto kLeftMatters = milliseconds(300);

constexpr int64_t kStoppedNs = 1'500'000'000;  // without a look: looks are five a second

constexpr auto kTimeToAgree = milliseconds(20);

constexpr std::size_t kMostHow = 7000;  // characters of a mismatch; a page has room for more

constexpr auto kTimeToTell = milliseconds(1000);
constexpr auto kTimeToHear = milliseconds(800);  // others look twice a second

constexpr const char* kRaised = "raised an exception that ended its script";

}  // namespace

// ---- life --------------------------------------------------------------------------------------

std::shared_ptr<Monitor> Monitor::create(Group group, std::unique_ptr<Board> board) {
  std::shared_ptr<Monitor> monitor(new Monitor(std::move(group), new_token()));
  monitor->start(std::move(board));
  return monitor;
}

Monitor::Monitor(Group group, uint64_t token)
    : group_(std::move(group)),
      owner_(getpid()),
      forks_(num_forks()),
      token_(token),
      page_(token),
      own_(Introduction::own(group_.identity, page_.fd(), token)),
      roster_(group_.rank, group_.world_size, group_.same_sequence) {}

Monitor::~Monitor() {
  leave();
}

void Monitor::start(std::unique_ptr<Board> board) {
  // Weakly: the courier's thread may hang in the store for longer than the group lives.
  const auto weak = weak_from_this();
  Courier::Duties duties;
  duties.meet = [weak](int rank, const Introduction& introduction) {
    const auto self = weak.lock();
    return !self || self->roster_.meet(rank, introduction, self->own_.process);
  };
  duties.far_ranks = [weak] {
    const auto self = weak.lock();
    return self ? self->roster_.far_ranks() : std::vector<int>();
  };
  duties.beat = [weak] {
    const auto self = weak.lock();
    return self
               ? Peer::
                     Beat{++self->num_beats_, self->page_.view().activity(), self->page_.view().progress()}
               : Peer::Beat();
  };
  duties.curious = [weak] {
    const auto self = weak.lock();
    return self && (self->curious_ || self->asks_);
  };
  duties.heard = [weak](int rank, const Peer::Beat& beat) {
    const auto self = weak.lock();
    if (const auto peer = self ? self->roster_.peer(rank) : nullptr) {
      peer->heard(beat);
    }
  };
  duties.failed = [weak](const std::string& text) {
    const auto self = weak.lock();
    if (auto failure = self ? Failure::from_text(text) : std::nullopt) {
      self->declare(std::move(*failure));
    }
  };
  courier_ = std::make_unique<Courier>(
      std::move(board), group_.rank, group_.world_size, own_, std::move(duties));
  Sentry::instance().add(shared_from_this());
}

uint8_t Monitor::number_of_constructed() const {
  return static_cast<uint8_t>((num_constructions_ - 1) % kNumConstructed);
}

uint8_t Monitor::next_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<uint8_t>(kNumConstructed + num_others_++ % kNumOthers);
}

void Monitor::set_subject(uint8_t model, std::weak_ptr<Subject> subject) {
  const std::lock_guard<std::mutex> lock(mutex_);
  subjects_[model] = std::move(subject);
}

void Monitor::begin_construction() {
  const auto number = ++num_constructions_;
  page_.note(Doing::kConstruction, Trail{kNoModel, number, 0, 0, 0}, 0);
}

void Monitor::note(Doing doing) {
  const auto progress = page_.view().progress();
  page_.note(doing, Trail{progress.model, progress.step, progress.num_launched, 0, 0}, 0);
}

void Monitor::write_note(const std::string& text) {
  page_.view().layout().note.write(text);
}

void Monitor::check_process() const {
  if (forks_ != num_forks()) {
    throw std::runtime_error(
        "[ddpx rank " + std::to_string(group_.rank) +
        "] this process was forked off after the model was wrapped, and is no rank of the group. "
        "Use the module itself in it (model.module), or start it by spawn and make a group there.");
  }
}

// ---- failures ----------------------------------------------------------------------------------

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
      page_.declare(own.to_text());
    }
  }
  // Ranks may find it at the same moment, each in its own words: those of the first one count.
  std::this_thread::sleep_for(kTimeToAgree);
  auto known = roster_.find_declared(page_.view().layout().declared_ns);
  declare(known ? std::move(*known) : std::move(own));
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
  RankReport found{*failure_, group_.rank, own.training_step(), own.doing, std::nullopt, {}, {}};
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
  log(Level::kError, "rank_failed", failure.describe(), failure.first_rank());
  courier_->post_failure(failure.to_text());
  group_.abort();
}

void Monitor::explain_error(const std::string& said) {
  curious_ = true;
  courier_->hurry();
  auto start = now_ns();
  auto last = start;
  const bool any_far = !roster_.far_ranks().empty();
  while (true) {
    raise_if_failed(said);
    const auto now = now_ns();
    if (now - std::exchange(last, now) > kStoppedNs) {
      start = now;  // others may have told meanwhile what this one has not heard yet
    }
    const auto waited = std::chrono::nanoseconds(now - start);
    auto failure = find_failure(/*also_left=*/!was_told());
    if (!failure && waited > kTimeToSee && !courier_->silent()) {
      failure = roster_.find_silent(start);
    }
    if (!failure && waited > kTimeToSee) {
      failure = roster_.find_unknown(!courier_->silent());
    }
    if (failure) {
      declare(std::move(*failure));
      continue;
    }
    if (waited > (any_far ? kTimeToSeeFar : kTimeToSee)) {
      break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    declared_.wait_for(lock, kBetweenLooks, [this] { return failure_.has_value(); });
  }
  const bool store_lost = any_far && courier_->silent(kStoreLost);
  if (auto failure = store_lost ? find_store_lost() : std::nullopt) {
    declare(std::move(*failure));
    raise_if_failed(said);
  }
  curious_ = false;
}

// After an error that nothing else explains.
std::optional<Failure> Monitor::find_store_lost() const {
  const auto first = group_.rank != 0 ? roster_.peer(0) : nullptr;
  if (!first || first->local()) {
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
  if (group_.rank == 0 || roster_.peer(0) || !courier_->silent(kLongSilence)) {
    return std::nullopt;
  }
  if (!courier_->server_ended()) {
    courier_->look_for_server();
    return std::nullopt;
  }
  auto failure = roster_.find_unknown(/*store_answers=*/false);
  return failure && failure->first_rank() == 0 ? failure : std::nullopt;
}

// ---- what the sentry does ----------------------------------------------------------------------

std::vector<int> Monitor::ends_of_peers() const {
  std::vector<int> fds;
  for (const auto& peer : roster_.peers()) {
    if (peer && peer->watch() && peer->watch()->fd() >= 0 && !peer->watch()->ended()) {
      fds.push_back(peer->watch()->fd());
    }
  }
  return fds;
}

void Monitor::look() {
  if (page_.view().presence() == Presence::kLeft || page_.view().presence() == Presence::kFailing) {
    return;  // this rank's end is no time to look after others
  }
  const auto now = now_ns();
  if (now - looked_ns_ > kStoppedNs) {
    awake_ns_ = now;
  }
  looked_ns_ = now;
  if (!failed()) {
    look_for_failures();
  }
  look_for_stalls();
  look_at_self();
}

// Who was stopped itself, or its machine, has waited for nobody meanwhile.
int64_t Monitor::waited_ns(const Activity& own) const {
  return std::max<int64_t>(0, looked_ns_ - std::max(own.since_ns, awake_ns_));
}

void Monitor::look_for_failures() {
  if (page_.view().layout().declared_ns != 0) {
    return;  // raise_mismatch() is about to agree on one
  }
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
  if (!failure && waited > kLongSilence) {
    failure = find_store_ended_early();
  }
  if (failure) {
    declare(std::move(*failure));
  }
}

void Monitor::log(Level level, const char* event, std::string message, int about) const {
  std::replace(message.begin(), message.end(), '\n', ' ');  // one line a fact
  const auto own = page_.view().activity();
  Journal::instance().add(
      Record{
          level,
          event,
          std::move(message),
          {{"rank", std::to_string(group_.rank)},
           {"about_rank", std::to_string(about)},
           {"step", std::to_string(own.training_step())},
           {"phase", to_string(own.doing)}},
          token_});
}

// ---- the end of this rank ----------------------------------------------------------------------

void Monitor::fail(const std::string& cause) {
  if (owner_ != getpid()) {
    return;  // forked off: the page is the parent's
  }
  const auto known = report();
  page_.fail(cause, known ? std::make_optional(known->failure.first_rank()) : std::nullopt);
  if (!known) {
    const auto doing = roster_.names().describe(page_.view().activity());
    const Failure failure{
        FailureKind::kDead,
        {{group_.rank, own_.host, own_.process.pid, kRaised, cause, doing}},
        {}};
    courier_->post_failure(failure.to_text());
    courier_->flush(kTimeToTell);
    if (group_.rank == 0 && !roster_.far_ranks().empty()) {
      std::this_thread::sleep_for(kTimeToHear);  // the store may end with this process
    }
  }
}

void Monitor::leave() {
  if (owner_ == getpid()) {
    page_.leave();
  }
}

}  // namespace ddpx::health
