#include "host_channel.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <utility>

#include "../machine/fields.h"
#include "channel_keys.h"

namespace ddpx::health {
namespace {

constexpr std::ptrdiff_t kNumWatched = 9;  // so that eight adjacent hosts can be lost at once

// Kinds of events.
constexpr const char* kFailure = "failure";
constexpr const char* kCall = "call";
constexpr const char* kLeaving = "leaving";

// In messages.
constexpr const char* kLeft = "left";
constexpr const char* kLeftMark = "L";
constexpr char kCallsMark = '/';  // before its number of calls

std::string kind_of(const std::string& event) {
  const auto fields = split_fields(event);
  return fields.size() == 2 ? fields[0] : std::string();
}

}  // namespace

HostChannel::HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now)
    : settings_(std::move(settings)), probe_(std::move(probe)), now_(std::move(now)) {}

// ---- events -------------------------------------------------------------------------------------

std::string HostChannel::wake_key() const {
  return wake_key_of(table_->host);
}

void HostChannel::post(Store& store, const std::string& kind, const std::string& text) {
  const auto event = join_fields({kind, text});
  std::string standing;
  while (standing != event) {
    const uint32_t number = table_->next_event;
    standing = store.set_first(event_key(number), event);
    handle(number, standing);
    if (standing != event && (kind_of(standing) == kFailure || kind_of(standing) == kind)) {
      return;  // one call is as good as another one
    }
  }
  // A host that is not in the list yet looks for events after it has entered itself.
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
  post(store, kFailure, text);
}

// A host hears of a declared failure before it hears anything else of this host.
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
    post(store, kLeaving, {});
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

// Both threads of the channel, and keepers of the same host, may handle an event at the same time.
void HostChannel::handle(uint32_t number, const std::string& event) {
  const auto kind = kind_of(event);
  if (kind == kFailure) {
    table_->declare(split_fields(event)[1], now_());
    table_->failure_posted = true;
    return;  // the last event: nobody waits for a later one
  }
  if (kind == kLeaving) {
    table_->store_may_end = true;
  } else if (kind == kCall) {
    fast_until_ns_ = now_() + times::kFastWriting;
    renewal_ns_ = 0;
  }
  uint32_t expected = number;
  table_->next_event.compare_exchange_strong(expected, number + 1);
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
  // A call lets all hosts write at once, and then twice a second: a host that lives is then heard
  // of soon, though nobody waits on it. Without prompt answers this would be of no use.
  if (is_wanted() && keeper_.is_prompt && now_() > fast_until_ns_ - times::kPromptAnswer) {
    post(store, kCall, std::to_string(table_->host));
    keeper_.check_ns = 0;
  }
  // What is due first comes first, so that a slow store leaves time for both.
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

// If the lease had ended, other hosts may have declared this host lost, and may have ended since.
// Then ranks of this host wait until all other hosts have answered a call. Earlier messages say
// nothing: they may have been written before the other host declared this host lost.
void HostChannel::renew(Store& store) {
  const auto start = now_();
  renewal_ns_ = start + period_ns();
  // The time is a counter that another keeper of this host can continue.
  write(store, message(std::to_string(start)));
  const int64_t renewed_ns = table_->renewed_ns;
  if (keeper_.cut_off_ns == 0 && start - renewed_ns > settings_.lease_ns) {
    keeper_.cut_off_ns = start;
    keeper_.call_event = table_->next_event;  // write() has handled all earlier ones
    for (auto& host : keeper_.others) {
      host.has_answered = false;
      host.silent_ns = 0;
    }
    post(store, kCall, std::to_string(table_->host));
    keeper_.check_ns = 0;
  }
  if (keeper_.cut_off_ns == 0) {
    table_->renewed_ns = std::max(renewed_ns, start);
  }
}

// A connection keeps the order of requests: the answer to listen() shows that the store has the
// message, and the entry in the list, though it does not answer to `set` and `append`.
void HostChannel::write(Store& store, const std::string& message) {
  store.set({host_key(table_->host)}, message);
  if (!keeper_.listed.contains(table_->host)) {
    store.append(kHosts, join_fields({std::to_string(table_->host)}));
  }
  listen(store);
  keeper_.listed.insert(table_->host);
}

std::set<uint64_t> HostChannel::read_hosts(Store& store) const {
  std::set<uint64_t> hosts;
  for (const auto& text : split_fields(store.get(kHosts).value_or(""))) {
    hosts.insert(to_number<uint64_t>(text).value_or(0));
  }
  return hosts;
}

// The next hosts of the ring. All hosts if one of these has been silent for long, if this host was
// cut off, and now and then if a rank waits: then all hosts read all hosts.
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
    const auto fields = split_fields(next.message);
    const auto failure =
        fields.size() == 4 ? probe_->compare_calls(next.ranks.front(), fields[2]) : std::nullopt;
    if (failure) {
      post_failure(store, *failure);
    }
  } else if (std::all_of(hosts.begin(), hosts.end(), has_answered)) {
    keeper_.cut_off_ns = 0;
    table_->renewed_ns = end;
  } else {
    declare_lost(store, does_not_answer);
  }
}

// Reads the last messages of hosts, and counts for how long they have been silent. A request for a
// key that does not exist would wait, so a host that has not written yet is left out.
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

// Four fields: a counter, or kLeft; the number of events that this host has handled; calls; and the
// activities of the ranks of the host, in order, each with the rank's number of calls. Ranks that
// have left are marked.
std::string HostChannel::message(const std::string& counter) const {
  std::vector<std::string> ranks;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    if (table_->is_member(rank)) {
      const auto& entry = table_->rank(rank);
      const char* mark = entry.has_left ? kLeftMark : "";  // before its last activity
      ranks.push_back(
          std::to_string(entry.activity.load().packed()) + kCallsMark +
          std::to_string(entry.num_calls) + mark);
    }
  }
  const auto num_handled = std::to_string(table_->next_event);
  return join_fields({counter, num_handled, probe_->calls(), join_fields(ranks)});
}

void HostChannel::absorb(Host& host, const std::string& message) {
  if (host.message == message) {
    return;
  }
  host.message = message;
  host.silent_ns = 0;
  const auto now = now_();
  const auto fields = split_fields(message);
  host.has_left = !fields.empty() && fields[0] == kLeft;
  if (fields.size() == 4) {
    host.has_answered = to_number<uint32_t>(fields[1]).value_or(0) > keeper_.call_event;
  }
  auto ranks = split_fields(fields.empty() ? std::string() : fields.back());
  for (std::size_t i = 0; i < std::min(host.ranks.size(), ranks.size()); ++i) {
    auto& entry = table_->rank(host.ranks[i]);
    const bool has_left = ranks[i].ends_with(kLeftMark);
    if (has_left) {
      ranks[i].pop_back();
    }
    const auto end = ranks[i].find(kCallsMark);
    const auto activity = to_number<uint64_t>(ranks[i].substr(0, end)).value_or(0);
    if (end != std::string::npos) {
      entry.num_calls = to_number<uint64_t>(ranks[i].substr(end + 1)).value_or(0);
    }
    if (!entry.activity.is_known() || entry.activity.load().packed() != activity) {
      // Clocks of other machines are not comparable.
      entry.activity.store(Activity::unpacked(activity, now));
    }
    if (has_left) {
      entry.has_left = true;
    }
    entry.heard_ns = now;
  }
}

}  // namespace ddpx::health
