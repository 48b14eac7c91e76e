#include "monitor.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "calls.h"
#include "sentry.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

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
  duties.met = [weak] {
    const auto self = weak.lock();
    return !self || self->page_.view().layout().num_readers >= self->roster_.num_pages();
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
  duties.calls_to_tell = [weak] {
    const auto self = weak.lock();
    return self ? self->calls_to_tell() : std::nullopt;
  };
  duties.compare_calls = [weak](int rank, const std::string& theirs) {
    const auto self = weak.lock();
    return self ? self->compare_calls(rank, theirs) : std::nullopt;
  };
  duties.failed = [weak](const std::string& text) {
    const auto self = weak.lock();
    if (!self || self->page_.view().presence() == Presence::kFailing) {
      return;  // it may be what this rank has posted itself
    }
    if (auto failure = Failure::from_text(text)) {
      self->declare(std::move(*failure));
    }
  };
  courier_ = std::make_unique<Courier>(
      std::move(board), group_.rank, group_.world_size, own_, std::move(duties));
  courier_->start();  // not before: its duties use it
  Sentry::instance().add(shared_from_this());
}

uint32_t Monitor::number_of_constructed() const {
  return num_constructions_ - 1;
}

uint32_t Monitor::next_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kFirstOther + num_others_++;
}

// Ranks of one machine compare their calls among themselves; the lowest of them speaks for all.
std::optional<Courier::Calls> Monitor::calls_to_tell() {
  const auto counterpart = roster_.counterpart();
  speaks_for_machine_ = counterpart.has_value();
  return counterpart && !failed()
             ? std::make_optional(Courier::Calls{*counterpart, samples_.to_text()})
             : std::nullopt;
}

std::optional<std::string> Monitor::compare_calls(int rank, const std::string& theirs) const {
  const auto found = samples_.find_mismatch(theirs, group_.same_sequence);
  if (!found) {
    return std::nullopt;
  }
  std::vector<std::pair<int, Trail>> ranks{{group_.rank, found->first}, {rank, found->second}};
  std::sort(
      ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return Failure{FailureKind::kMismatch, {}, describe_mismatch(ranks)}.to_text();
}

void Monitor::set_subject(uint8_t model, std::weak_ptr<Subject> subject) {
  const std::lock_guard<std::mutex> lock(mutex_);
  subjects_[model] = std::move(subject);
}

void Monitor::begin_construction() {
  const auto number = ++num_constructions_;
  page_.note(Doing::kConstructing, Trail{kNoModel, number, 0, 0, 0}, 0);
}

// Who has begun fewer than another rank is behind it.
void Monitor::begin_call() {
  if (page_.view().activity().doing == Doing::kConstructing) {
    const auto progress = page_.view().progress();
    const auto num_calls = static_cast<uint16_t>(progress.num_launched + 1);
    page_.note(Doing::kConstruction, Trail{kNoModel, progress.step, num_calls, 0, 0}, 0);
  }
}

void Monitor::end_call() {
  if (page_.view().activity().doing == Doing::kConstruction) {
    note(Doing::kConstructing);
  }
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
  const auto presence = page_.view().presence();
  if (presence == Presence::kLeft) {
    return;
  }
  const auto now = now_ns();
  if (now - looked_ns_ > kStoppedNs) {
    awake_ns_ = now;
  }
  looked_ns_ = now;
  if (presence != Presence::kFailing) {  // no time to look after others
    if (!failed()) {
      look_for_failures();
    }
    look_for_stalls();
  }
  look_at_self();
}

// Who was stopped itself, or its machine, has waited for nobody meanwhile.
int64_t Monitor::waited_ns(const Activity& own) const {
  return std::max<int64_t>(0, looked_ns_ - std::max<int64_t>(own.since_ns, awake_ns_));
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

std::chrono::steady_clock::time_point Monitor::time_to_tell() {
  return std::chrono::steady_clock::now() + kTimeToTell;
}

void Monitor::fail(const std::string& cause, std::chrono::steady_clock::time_point deadline) {
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
  }
  const bool by_store = courier_->is_needed();
  if (!known || by_store) {
    courier_->flush(deadline);
  }
  if (group_.rank == 0 && by_store) {
    heard_by_ = std::chrono::steady_clock::now() + kTimeToHear;
  }
}

void Monitor::linger() const {
  std::this_thread::sleep_until(heard_by_.load());
}

void Monitor::leave() {
  if (owner_ == getpid()) {
    page_.leave();
  }
}

}  // namespace ddpx::health
