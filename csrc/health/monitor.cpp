#include "monitor.h"

#include <stdexcept>
#include <thread>
#include <utility>

#include "../os/forks.h"
#include "../os/threads.h"

namespace ddpx::health {
namespace {

constexpr const char* kRaised = "raised an exception that ended its script";

}  // namespace

Monitor::Monitor(WatchedGroup group, StoreAccess store)
    : forks_(os::num_forks()),
      state_(GroupState::create(std::move(group), std::move(store))),
      waits_(*state_),
      stalls_(*state_),
      recorded_(*state_) {}

Monitor::~Monitor() {
  leave();
}

bool Monitor::is_forked() const {
  return forks_ != os::num_forks();
}

void Monitor::check_process() const {
  if (is_forked()) {
    throw std::runtime_error(
        "[ddpx rank " + std::to_string(state_->group.rank) +
        "] this process was forked off after the model was wrapped, and is not a rank of the "
        "group. Use the module itself in this process (model.module), or start the process by "
        "spawn and create a group in it.");
  }
}

// ---- for the watchdog ---------------------------------------------------------------------------

void Monitor::check() {
  const auto presence = page().view().presence();
  if (presence == Presence::kLeft) {
    return;
  }
  awake_.update(now_ns());
  state_->meet();
  state_->publish_calls();
  state_->publish_to_hosts();
  state_->channel->check(awake_.since_ns());
  if (presence != Presence::kFailing) {  // a rank that ends does not judge its peers
    const auto wait = waits_.find(now_ns());
    if (const auto failure = failed() ? std::nullopt : find_failure(wait)) {
      declare(*failure);
    }
    if (!failed() && !explains_error_ && state_->group.has_error()) {
      explains_error_ = explain_error_of_backend();
    }
    if (const auto failure = stalls_.check(wait, awake_, failed())) {
      declare(*failure);
    }
  }
  check_self();
}

// On a thread of its own, because the search waits. The host raises the failure at its next call.
// Returns whether the thread could start.
bool Monitor::explain_error_of_backend() {
  return os::start_thread([weak = weak_from_this()] {
    try {
      if (const auto monitor = weak.lock()) {
        monitor->find_cause_of_error("an error of the backend");
      }
    } catch (const std::exception&) {
      // The failure is declared.
    }
  });
}

// Publishes the missing gradients of this rank, and forwards requests for its stack.
void Monitor::check_self() {
  auto& own = page().view();
  const auto detail = peers().names().describe_missing(own.activity());
  if (detail != own.detail.read()) {
    own.detail.write(detail);
  }
  const auto wanted = own.num_stack_requests.load();
  if (std::exchange(num_stacks_served_, wanted) != wanted) {
    state_->log("stack_wanted", {}, state_->group.rank);
  }
}

// ---- the end of this rank ----------------------------------------------------------------------

int64_t Monitor::delivery_deadline() {
  return now_ns() + times::kDelivery;
}

void Monitor::fail(const std::string& cause, int64_t deadline_ns) {
  if (is_forked()) {
    return;  // the page is the parent's
  }
  auto& channel = *state_->channel;
  const int rank = state_->group.rank;
  const auto known = failure_.get();
  page().fail(cause, /*blames_peer=*/known && !known->lost.empty());
  auto* table = state_->table();
  const bool on_one_host = state_->stage() == HostTable::Stage::kOneHost;
  if (!known) {
    const auto& own = state_->own;
    const auto doing = peers().names().describe(state_->activity());
    const Failure failure{
        FailureKind::kDead, {{rank, own.host, own.process.pid, kRaised, cause, doing}}, {}};
    const auto text = failure.encode();
    const auto standing = table != nullptr ? table->declare(text) : text;
    if (!on_one_host) {
      channel.post_failure(standing);
    }
  }
  if (on_one_host) {
    return;
  }
  channel.flush(deadline_ns);
  // The keeper of this host may be another rank, or may have ended.
  poll_until(deadline_ns, times::kPostPoll, [&] {
    return table == nullptr || !table->declared() || table->failure_posted ||
           channel.store_state() >= StoreState::kLost;
  });
}

void Monitor::leave() {
  if (is_forked() || page().view().presence() != Presence::kThere) {
    return;
  }
  try {
    state_->publish_calls();
    page().view().device.forget();
    page().end_as(Presence::kLeft);
    auto* table = state_->table();
    if (table == nullptr) {
      return;
    }
    const int rank = state_->group.rank;
    state_->publish_to_hosts();
    table->rank(rank).has_left = true;  // last: readers then have the last activity
    const bool serves_store = peers().store_rank() == rank;
    const bool is_keeper = table->keeper_plus_1 == rank + 1;
    if (state_->has_lease() && !failed() && (serves_store || is_keeper)) {
      state_->channel->leave(serves_store);
    }
  } catch (const std::exception&) {
    // Out of memory or threads, for example. The lease of this host then ends.
  }
}

void Monitor::await_delivery(const std::vector<std::shared_ptr<Monitor>>& monitors) {
  const auto deadline_ns = delivery_deadline();
  bool any_must_be_read = false;
  for (const auto& monitor : monitors) {
    any_must_be_read = monitor->must_be_read(deadline_ns) || any_must_be_read;
  }
  if (any_must_be_read) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(times::kDeliveredRead));
  }
}

// Waits until the store has the messages of this rank. Returns whether other hosts must read them
// before this process ends.
bool Monitor::must_be_read(int64_t deadline_ns) const {
  const bool serves_store = peers().store_rank() == state_->group.rank;
  const auto presence = page().view().presence();
  if (presence == Presence::kFailing) {
    return serves_store && state_->stage() != HostTable::Stage::kOneHost;
  }
  return presence == Presence::kLeft && state_->channel->flush(deadline_ns) && serves_store &&
         state_->has_lease();
}

}  // namespace ddpx::health
