#include "host_channel.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <utility>

#include "../machine/record.h"

namespace ddpx::health {
namespace {

constexpr std::ptrdiff_t kNumWatched = 9;  // so that eight adjacent hosts can be lost at once

// In a message, in place of the counter: the keeper has left.
constexpr int64_t kLeft = 0;

// A rank of a host, in the messages of the host.
struct RankState {
  uint64_t activity = 0;
  uint64_t num_calls = 0;
  uint64_t has_left = 0;
};

}  // namespace

HostChannel::HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now)
    : settings_(std::move(settings)), probe_(std::move(probe)), now_(std::move(now)) {}

// ---- events -------------------------------------------------------------------------------------

std::string HostChannel::wake_key() const {
  return wake_key_of(table_->host);
}

void HostChannel::post(Store& store, EventKind kind, const std::string& text) {
  const auto event = encode(kind, text);
  std::string standing;
  while (standing != event) {
    const uint32_t number = table_->next_event;
    standing = store.set_first(event_key(number), event);
    const auto its_kind = handle(number, standing);
    if (standing != event && (its_kind == EventKind::kFailure || its_kind == kind)) {
      return;  // a request of another host has the same effect
    }
  }
  // A host that is not in the list yet reads events after it has entered itself.
  std::vector<std::string> keys;
  for (const auto token : read_hosts(store)) {
    if (token != table_->host) {
      keys.push_back(wake_key_of(token));
    }
  }
  if (!keys.empty()) {
    store.set(keys, "wake");
  }
}

void HostChannel::post_failure(Store& store, const std::string& text) {
  post(store, EventKind::kFailure, text);
}

// Posts the failure of this host before any other message. Returns whether there is a failure.
bool HostChannel::post_declared(Store& store) {
  const auto failure = table_->declared();
  if (failure && !table_->failure_posted) {
    post_failure(store, *failure);
  }
  return failure.has_value();
}

void HostChannel::leave(Store& store, bool serves_store) {
  post_declared(store);
  if (table_->keeper_plus_1 == settings_.own.rank + 1) {
    write(store, message(kLeft));
  }
  if (serves_store) {
    post(store, EventKind::kLeaving, {});
  }
}

bool HostChannel::listen(Store& store) {
  bool any = false;
  while (!table_->failure_posted) {
    const uint32_t number = table_->next_event;
    const auto event = store.get(event_key(number));
    if (!event) {
      break;
    }
    handle(number, *event);
    any = true;
  }
  return any;
}

// Both threads of the channel, and two keepers of a host, may handle an event at the same time.
HostChannel::EventKind HostChannel::handle(uint32_t number, std::string_view event) {
  auto kind = EventKind::kUnknown;
  std::string text;
  if (!decode(event, kind, text)) {
    kind = EventKind::kUnknown;
  }
  if (kind == EventKind::kFailure) {
    table_->declare(text);
    table_->failure_posted = true;
    return kind;  // the last event: no host reads a later event
  }
  if (kind == EventKind::kLeaving) {
    table_->store_may_end = true;
  } else if (kind == EventKind::kRequest) {
    fast_until_ns_ = now_() + times::kFastWriting;
    renewal_ns_ = 0;
  }
  uint32_t expected = number;
  table_->next_event.compare_exchange_strong(expected, number + 1);
  return kind;
}

// ---- keeping the lease --------------------------------------------------------------------------

bool HostChannel::should_keep() const {
  if (!is_decided_ || table_->stage == HostTable::Stage::kOneHost || table_->failure_posted) {
    return false;
  }
  const int keeper = table_->keeper_plus_1 - 1;
  if (keeper == settings_.own.rank) {
    return true;
  }
  const auto age = now_() - table_->renewed_ns;
  const bool keeper_lives = keeper >= 0 && keeper < settings_.world_size && probe_->lives(keeper);
  const auto turn =
      keeper_lives ? times::takeover_turn(settings_.lease_ns) : times::kDeadKeeperTurn;
  auto patience = keeper_lives ? turn : 0;
  for (int rank = 0; rank < settings_.own.rank && age > patience; ++rank) {
    const bool may_take_over = rank != keeper && table_->is_member(rank) && probe_->lives(rank);
    patience += may_take_over ? turn : 0;
  }
  return age > patience;
}

int64_t HostChannel::step(Store& store) {
  if (post_declared(store)) {
    return kNever;
  }
  table_->keeper_plus_1 = settings_.own.rank + 1;
  if (table_->stage != HostTable::Stage::kManyHosts) {
    return gather(store);
  }
  if (keeper_.others.empty()) {
    build_ring();
  }
  // After a request for messages, all hosts write at once, and then twice a second. So a message of
  // each host that lives arrives soon. This needs a store that answers in time.
  if (is_wanted() && keeper_.is_prompt && now_() > fast_until_ns_ - times::kPromptAnswer) {
    post(store, EventKind::kRequest, encode(table_->host.load()));
    keeper_.check_ns = 0;
  }
  // The request that is due first is first, so a slow store leaves time for both requests.
  const bool renewal_is_next = renewal_ns_ <= keeper_.check_ns;
  if (renewal_is_next && now_() >= renewal_ns_) {
    renew(store);
  } else if (!renewal_is_next && now_() >= keeper_.check_ns) {
    check(store);
  }
  return std::min<int64_t>(renewal_ns_, keeper_.check_ns);
}

bool HostChannel::is_wanted() const {
  return now_() < table_->wanted_until_ns;
}

int64_t HostChannel::period_ns() const {
  const bool is_fast = now_() < fast_until_ns_ || is_wanted() || keeper_.cut_off_ns != 0;
  const auto period = times::renewal_period(settings_.lease_ns);
  return is_fast ? std::min(times::kFastPeriod, period) : period;
}

// If the lease had ended, other hosts may have declared this host lost. Ranks of this host then
// wait until all other hosts have answered a request for messages. Earlier messages do not count:
// the other host may have declared this host lost after it wrote them.
void HostChannel::renew(Store& store) {
  const auto start = now_();
  renewal_ns_ = start + period_ns();
  // The time is a counter that the next keeper of this host can continue.
  write(store, message(start));
  const int64_t renewed_ns = table_->renewed_ns;
  if (keeper_.cut_off_ns == 0 && start - renewed_ns > settings_.lease_ns) {
    keeper_.cut_off_ns = start;
    keeper_.request_event = table_->next_event;  // write() has handled all earlier ones
    for (auto& host : keeper_.others) {
      host.has_answered = false;
      host.silent_ns = 0;
    }
    post(store, EventKind::kRequest, encode(table_->host.load()));
    keeper_.check_ns = 0;
  }
  if (keeper_.cut_off_ns == 0) {
    table_->renewed_ns = std::max(renewed_ns, start);
  }
}

// `set` and `append` have no answer. A connection keeps the order of requests, so the answer to
// listen() shows that the store has the message, and the entry in the list.
void HostChannel::write(Store& store, const std::string& message) {
  store.set({host_key(table_->host)}, message);
  if (!keeper_.listed.contains(table_->host)) {
    store.append(kHosts, encode(table_->host.load()));
  }
  listen(store);
  keeper_.listed.insert(table_->host);
}

std::set<uint64_t> HostChannel::read_hosts(Store& store) const {
  std::set<uint64_t> hosts;
  const auto all = store.get(kHosts).value_or("");
  std::string_view rest = all;
  for (uint64_t host = 0; decode(rest, host);) {
    hosts.insert(host);
  }
  return hosts;
}

// The number of hosts to read, from the next host of the ring on. All hosts if a host is suspected,
// if this host was cut off, and at times if a rank waits.
std::size_t HostChannel::num_watched() const {
  const auto near = std::min(kNumWatched, std::ssize(keeper_.others));
  const auto end = keeper_.others.begin() + near;
  const bool all = keeper_.cut_off_ns != 0 || (is_wanted() && now_() >= keeper_.read_all_ns) ||
                   std::any_of(keeper_.others.begin(), end, [this](const Host& host) {
                     return host.silent_ns > times::suspicion(settings_.lease_ns);
                   });
  return all ? keeper_.others.size() : static_cast<std::size_t>(near);
}

void HostChannel::check(Store& store) {
  const std::span<Host> hosts(keeper_.others.data(), num_watched());
  const int64_t all_take_ns = table_->between_reads_ns;
  const auto start = now_();
  read(store, hosts);
  const auto end = now_();
  keeper_.check_ns = start + period_ns();
  if (hosts.size() == keeper_.others.size()) {
    table_->read_ns = end;
    keeper_.read_all_ns = start + all_take_ns;
  }
  const auto silent_for = [](int64_t limit_ns) {
    return [limit_ns](const Host& host) { return host.silent_ns >= limit_ns; };
  };
  const auto has_answered = [](const Host& host) { return host.has_answered || host.has_left; };
  const auto does_not_answer =
      [=, limit_ns = times::suspicion(settings_.lease_ns) + all_take_ns](const Host& host) {
        return !has_answered(host) && host.silent_ns > limit_ns;
      };
  const auto& next = keeper_.others.front();
  if (std::any_of(hosts.begin(), hosts.end(), silent_for(settings_.lease_ns))) {
    declare_lost(store, [this](const Host& host) {
      const bool is_near = &host - keeper_.others.data() < kNumWatched;
      return host.silent_ns >= (is_near ? times::shared_loss(settings_.lease_ns)
                                        : times::distant_loss(settings_.lease_ns));
    });
  } else if (keeper_.cut_off_ns == 0) {
    if (const auto failure = probe_->compare_calls(next.ranks.front(), next.calls)) {
      post_failure(store, *failure);
    }
  } else if (std::all_of(hosts.begin(), hosts.end(), has_answered)) {
    keeper_.cut_off_ns = 0;
    table_->renewed_ns = end;
  } else {
    declare_lost(store, does_not_answer);
  }
}

// Reads the last messages of hosts, and measures their silence. A request for a key that does not
// exist would block, so a host that has not written yet is left out.
void HostChannel::read(Store& store, std::span<Host> hosts) {
  const auto is_listed = [this](const Host& host) { return keeper_.listed.contains(host.token); };
  if (!std::all_of(hosts.begin(), hosts.end(), is_listed)) {
    keeper_.listed.merge(read_hosts(store));
  }
  std::vector<std::string> keys;
  for (const auto& host : hosts) {
    if (is_listed(host)) {
      keys.push_back(host_key(host.token));
    }
  }
  const auto start = now_();
  const auto texts = keys.empty() ? std::vector<std::string>() : store.multi_get(keys);
  keeper_.is_prompt = now_() - start < times::kPromptAnswer;
  const auto longest_gap = times::renewal_period(settings_.lease_ns) + times::kPromptAnswer;
  auto text = texts.begin();
  for (auto& host : hosts) {
    if (keeper_.is_prompt && host.checked_ns != 0) {
      host.silent_ns += std::min(start - host.checked_ns, longest_gap);
    }
    host.checked_ns = keeper_.is_prompt ? start : 0;
    if (is_listed(host)) {
      absorb(host, *text++);  // a new message resets `silent_ns`
    }
    host.silent_ns = host.has_left ? 0 : host.silent_ns;
  }
}

void HostChannel::declare_lost(Store& store, const std::function<bool(const Host&)>& is_lost) {
  std::vector<int> ranks;
  int64_t silent_ns = 0;
  for (const auto& host : keeper_.others) {
    if (is_lost(host)) {
      ranks.insert(ranks.end(), host.ranks.begin(), host.ranks.end());
      silent_ns = std::max(silent_ns, host.silent_ns);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  if (!ranks.empty()) {
    post_failure(store, probe_->describe_lost(ranks, silent_ns));
  }
}

// ---- messages -----------------------------------------------------------------------------------

// A counter, or kLeft; the number of events that this host has handled; calls; and the states of
// the ranks of the host, in order.
std::string HostChannel::message(int64_t counter) const {
  std::vector<RankState> ranks;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    if (table_->is_member(rank)) {
      const auto& entry = table_->rank(rank);
      const bool has_left = entry.has_left;  // before its last activity
      ranks.push_back({entry.activity.load().packed(), entry.num_calls, has_left ? 1u : 0u});
    }
  }
  return encode(counter, table_->next_event.load(), probe_->calls(), ranks);
}

void HostChannel::absorb(Host& host, const std::string& message) {
  if (host.message == message) {
    return;
  }
  host.message = message;
  host.silent_ns = 0;
  const auto now = now_();
  int64_t counter = 0;
  uint32_t num_handled = 0;
  std::vector<RankState> ranks;
  std::string_view rest = message;
  if (!decode(rest, counter, num_handled, host.calls, ranks)) {
    return;
  }
  host.has_left = counter == kLeft;
  host.has_answered = num_handled > keeper_.request_event;
  for (std::size_t i = 0; i < std::min(host.ranks.size(), ranks.size()); ++i) {
    auto& entry = table_->rank(host.ranks[i]);
    entry.num_calls = ranks[i].num_calls;
    const auto known = entry.activity.known();
    const bool is_known = ranks[i].activity != 0;  // see SharedActivity
    if (is_known && (!known || known->packed() != ranks[i].activity)) {
      // Clocks of other machines are not comparable.
      entry.activity.store(Activity::unpacked(ranks[i].activity, now));
    }
    if (ranks[i].has_left != 0) {
      entry.has_left = true;
    }
    entry.heard_ns = now;
  }
}

}  // namespace ddpx::health
