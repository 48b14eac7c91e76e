#include "monitor.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "calls.h"
#include "watchdog.h"

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

constexpr auto kTimeToDeliver = milliseconds(1000);
constexpr auto kTimeToHear = milliseconds(700);  // other hosts are woken, and then read the event

constexpr const char* kRaised = "raised an exception that ended its script";

}  // namespace

// ---- life --------------------------------------------------------------------------------------

// Holds the monitor weakly: a thread that waits for the store may outlive it.
class Monitor::Probe final : public HostProbe {
 public:
  explicit Probe(std::weak_ptr<Monitor> monitor, std::shared_ptr<HostTable> own, uint64_t token)
      : monitor_(std::move(monitor)), own_(std::move(own)), token_(token) {}

  std::shared_ptr<HostTable> open(const Introduction& rank) override {
    if (rank.token == token_) {
      return own_;
    }
    const auto self = monitor_.lock();
    const bool is_near = self && rank.process.machine == self->own_.process.machine;
    const auto page = is_near ? open_page(rank, self->group_.world_size) : nullptr;
    return page ? std::shared_ptr<HostTable>(page, &page->host) : nullptr;
  }
  bool lives(int rank) override {
    const auto self = monitor_.lock();
    if (!self || rank == self->group_.rank) {
      return self != nullptr;
    }
    const auto peer = self->peers_.peer(rank);
    return peer && peer->local() && !peer->ended() &&
           (peer->presence() == Presence::kThere || peer->presence() == Presence::kTerminated);
  }
  std::string describe_lost(const std::vector<int>& ranks, int64_t silent_ns) override {
    Failure failure;
    const auto self = monitor_.lock();
    for (const int rank : ranks) {
      if (self) {
        failure.lost.push_back(self->peers_.lost_rank(
            rank,
            "has not been heard of for " + in_seconds(silent_ns) +
                " s: its machine, or the network to it, is lost or stopped"));
      }
    }
    return failure.to_text();
  }
  std::string calls() override {
    const auto self = monitor_.lock();
    return self ? self->page_.view().calls.to_text() : std::string();
  }
  std::optional<std::string> compare_calls(int rank, const std::string& calls) override {
    const auto self = monitor_.lock();
    const auto found = self ? self->page_.view().calls.find_mismatch(calls) : std::nullopt;
    if (!found) {
      return std::nullopt;
    }
    const std::pair ours(self->group_.rank, found->first);
    const std::pair theirs(rank, found->second);
    const auto how = ours.first < theirs.first ? describe_mismatch({ours, theirs})
                                               : describe_mismatch({theirs, ours});
    return Failure{FailureKind::kMismatch, {}, how}.to_text();
  }

 private:
  const std::weak_ptr<Monitor> monitor_;
  const std::shared_ptr<HostTable> own_;
  const uint64_t token_;
};

std::shared_ptr<Monitor> Monitor::create(Group group, StoreAccess store) {
  std::shared_ptr<Monitor> monitor(new Monitor(std::move(group), new_token()));
  monitor->start(std::move(store));
  return monitor;
}

Monitor::Monitor(Group group, uint64_t token)
    : group_(std::move(group)),
      owner_(getpid()),
      forks_(num_forks()),
      token_(token),
      page_(token, group_.world_size),
      own_(Introduction::own(group_.rank, group_.identity, page_.fd(), token)),
      peers_(group_.rank, group_.world_size) {}

Monitor::~Monitor() {
  leave();
  threads_->stop();
}

void Monitor::start(StoreAccess store) {
  threads_ = std::make_shared<ChannelThreads>(
      HostChannel::Settings{own_, group_.world_size, group_.lease_ns},
      std::make_shared<Probe>(weak_from_this(), page_.host(), token_),
      std::move(store));
  Watchdog::instance().add(shared_from_this());
}

void Monitor::meet() {
  if (const auto table = threads_->channel().table()) {
    peers_.meet(table, own_.process);
    has_lease_ = table->stage == HostTable::Stage::kManyHosts;
  }
}

std::string Monitor::introduction() const {
  return has_met_ ? std::string() : own_.to_text();
}

uint64_t Monitor::find_host(const std::vector<std::string>& introductions) {
  met_.clear();
  for (const auto& text : introductions) {
    if (auto rank = Introduction::from_text(text)) {
      met_.push_back(std::move(*rank));
    }
  }
  return threads_->channel().find_host(met_);
}

void Monitor::meet(const std::vector<uint64_t>& hosts) {
  threads_->channel().meet(met_, hosts);
  has_met_ = true;
  meet();
}

uint32_t Monitor::number_of_constructed() const {
  return num_constructions_ - 1;
}

uint32_t Monitor::next_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kFirstOther + num_others_++;
}

void Monitor::set_missing_params(uint8_t model, MissingParams missing_params) {
  const std::lock_guard<std::mutex> lock(mutex_);
  missing_params_[model] = std::move(missing_params);
}

void Monitor::begin_construction() {
  const auto number = ++num_constructions_;
  page_.note({.doing = Doing::kConstructing, .model = kNoModel, .step = number});
}

// Who has begun fewer than another rank is behind it.
void Monitor::begin_call() {
  auto activity = page_.view().activity();
  if (activity.doing == Doing::kConstructing) {
    activity.doing = Doing::kConstruction;
    ++activity.bucket;
    page_.note(activity);
  }
}

void Monitor::end_call() {
  if (page_.view().activity().doing == Doing::kConstruction) {
    note(Doing::kConstructing);
  }
}

void Monitor::note(Doing doing) {
  auto activity = page_.view().activity();
  activity.doing = doing;
  page_.note(activity);
}

void Monitor::write_note(const std::string& text) {
  page_.view().note.write(text);
}

void Monitor::check_process() const {
  if (forks_ != num_forks()) {
    throw std::runtime_error(
        "[ddpx rank " + std::to_string(group_.rank) +
        "] this process was forked off after the model was wrapped, and is no rank of the group. "
        "Use the module itself in it (model.module), or start it by spawn and make a group there.");
  }
}

// ---- what the watchdog does --------------------------------------------------------------------

std::vector<int> Monitor::ends_of_peers() const {
  std::vector<int> fds;
  for (const auto& peer : peers_.all()) {
    if (peer && peer->watch() && peer->watch()->fd() >= 0 && !peer->ended()) {
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
  meet();
  if (auto* table = threads_->table()) {
    table->rank(group_.rank).activity.store(page_.view().activity());  // for other hosts
  }
  threads_->look(awake_ns_);
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
  const auto own = page_.view().activity();
  Watchdog::instance().log().add(
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

std::chrono::steady_clock::time_point Monitor::delivery_deadline() {
  return std::chrono::steady_clock::now() + kTimeToDeliver;
}

void Monitor::fail(const std::string& cause, std::chrono::steady_clock::time_point deadline) {
  if (owner_ != getpid()) {
    return;  // forked off: the page is the parent's
  }
  const auto known = report();
  page_.fail(cause, /*blames_peer=*/known && !known->failure.lost.empty());
  auto* table = threads_->table();
  const bool on_one_host = table != nullptr && table->stage == HostTable::Stage::kOneHost;
  if (!known) {
    const auto doing = peers_.names().describe(page_.view().activity());
    const Failure failure{
        FailureKind::kDead,
        {{group_.rank, own_.host, own_.process.pid, kRaised, cause, doing}},
        {}};
    const auto text = failure.to_text();
    const auto standing = table != nullptr ? table->declare(group_.rank, text, now_ns()) : text;
    if (!on_one_host) {
      threads_->post_failure(standing);
    }
  }
  if (!on_one_host) {
    threads_->flush(deadline);
    // The keeper of this host may be another rank, or have just ended.
    while (table != nullptr && table->declared() && !table->failure_posted &&
           threads_->store_state() < StoreState::kLost &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    if (group_.rank == 0) {
      heard_by_ = std::chrono::steady_clock::now() + kTimeToHear;
    }
  }
}

void Monitor::await_delivery() const {
  if (page_.view().presence() == Presence::kLeft) {
    if (threads_->flush(heard_by_) && group_.rank == 0 && has_lease_) {
      std::this_thread::sleep_for(kTimeToHear);
    }
  } else {
    std::this_thread::sleep_until(heard_by_.load());
  }
}

void Monitor::leave() {
  if (owner_ != getpid() || page_.view().presence() != Presence::kThere) {
    return;
  }
  page_.leave();
  const bool keeps = has_lease_ && threads_->table()->keeper_plus_1 == group_.rank + 1;
  if (has_lease_ && !failed() && (keeps || group_.rank == 0)) {
    threads_->leave();
    heard_by_ = delivery_deadline();
  }
}

}  // namespace ddpx::health
