#include "host_channel.h"

#include <algorithm>
#include <utility>

#include "channel_keys.h"
#include "fields.h"

namespace ddpx::health {
namespace {

constexpr int64_t kFastNs = 500'000'000;       // between messages while a rank needs them
constexpr int64_t kCallNs = 5'000'000'000;     // how long a call makes hosts write fast
constexpr int64_t kPromptNs = 1'000'000'000;   // a slower answer says nothing about other hosts
constexpr int64_t kTurnNs = 500'000'000;       // between ranks that take over from an ended keeper
constexpr int64_t kReadOfHostNs = 10'000'000;  // many hosts read each other less often
constexpr std::size_t kNumWatched = 9;         // so that eight adjacent hosts can be lost at once

// States of a host, in its messages.
constexpr const char* kIncomplete = "incomplete";  // ranks may be missing in the message
constexpr const char* kComplete = "complete";
constexpr const char* kLeft = "left";

// Kinds of events.
constexpr const char* kFailure = "failure";
constexpr const char* kCall = "call";
constexpr const char* kLeaving = "leaving";

std::string kind_of(const std::string& event) {
  const auto fields = split_fields(event);
  return fields.size() == 2 ? fields[0] : std::string();
}

}  // namespace

HostChannel::HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now)
    : settings_(std::move(settings)), probe_(std::move(probe)), now_(std::move(now)) {}

// ---- events -------------------------------------------------------------------------------------

std::string HostChannel::wake_key() const {
  return wake_key_of(keeper_.host_token);
}

void HostChannel::post(Store& store, const std::string& kind, const std::string& text) {
  const auto event = join_fields({kind, text});
  while (true) {
    const uint32_t number = table_->next_event;
    const auto standing = store.set_first(event_key(number), event);
    handle(number, standing);
    if (standing == event) {
      break;
    }
    if (kind_of(standing) == kFailure || kind_of(standing) == kind) {
      return;  // one call is as good as another one
    }
  }
  if (keeper_.others.empty() && table_->stage != HostTable::Stage::kOneHost) {
    read_list(store);
  }
  std::vector<std::string> keys;
  for (const auto& host : keeper_.others) {
    keys.push_back(wake_key_of(host.token));
  }
  if (!keys.empty()) {
    store.set(keys, "wake");
  }
}

void HostChannel::post_failure(Store& store, const std::string& text) {
  post(store, kFailure, text);
}

void HostChannel::leave(Store& store) {
  if (table_->keeper_plus_1 == settings_.own.rank + 1) {
    store.set({host_key(keeper_.host_token)}, message(/*leaves=*/true));
  }
  if (settings_.own.rank == 0) {
    post(store, kLeaving, {});
  }
}

bool HostChannel::listen(Store& store) {
  bool any = false;
  while (!failure_heard_) {
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

// Both threads of the channel, and keepers of the same host, may handle an event.
void HostChannel::handle(uint32_t number, const std::string& event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  const auto kind = kind_of(event);
  if (kind == kFailure) {
    table_->declare(settings_.own.rank, split_fields(event)[1], now_());
    table_->failure_posted = true;
    failure_heard_ = true;
    return;  // the last event: nobody waits for a later one
  }
  if (kind == kLeaving) {
    table_->store_may_end = true;
  } else if (kind == kCall) {
    fast_until_ns_ = now_() + kCallNs;
    urgent_ = true;
  }
  uint32_t expected = number;
  table_->next_event.compare_exchange_strong(expected, number + 1);
}

// ---- keeping the lease --------------------------------------------------------------------------

bool HostChannel::should_keep() const {
  if (!is_ready_ || table_->stage == HostTable::Stage::kOneHost) {
    return false;
  }
  const int keeper = table_->keeper_plus_1 - 1;
  const int own = settings_.own.rank;
  if (keeper == own) {
    return true;
  }
  const auto age = now_() - table_->renewed_ns;
  const bool keeper_lives = keeper >= 0 && keeper < settings_.world_size && probe_->lives(keeper);
  const auto turn = keeper_lives ? settings_.lease_ns / 5 : kTurnNs;
  auto patience = keeper_lives ? turn : 0;
  for (int rank = 0; rank < own && age > patience; ++rank) {
    const bool may_take_over = table_->rank(rank).place == HostTable::Place::kThisHost &&
                               rank != keeper && probe_->lives(rank);
    patience += may_take_over ? turn : 0;
  }
  return age > patience;
}

int64_t HostChannel::step(Store& store) {
  if (const auto failure = table_->declared()) {
    if (!table_->failure_posted) {
      post_failure(store, *failure);
    }
    return kNever;
  }
  const int keeper = table_->keeper_plus_1 - 1;
  const bool another_keeps = keeper >= 0 && keeper < settings_.own.rank &&
                             now_() - table_->renewed_ns < settings_.lease_ns / 5;
  if (another_keeps || table_->stage == HostTable::Stage::kOneHost) {
    return kNever;
  }
  table_->keeper_plus_1 = settings_.own.rank + 1;
  if (table_->stage != HostTable::Stage::kManyHosts) {
    return gather(store);
  }
  if (keeper_.others.empty()) {  // this rank has taken over
    read_hosts(store);
  }
  // A call lets all hosts write at once, and then twice a second: a host that lives is then heard
  // of soon, though nobody waits on it. Without prompt answers this would be of no use.
  if (is_wanted() && keeper_.is_prompt && now_() > fast_until_ns_ - kPromptNs) {
    post(store, kCall, std::to_string(keeper_.host_token));
    keeper_.check_ns = 0;
  }
  if (urgent_.exchange(false) || now_() >= keeper_.renewal_ns) {
    renew(store);
  } else if (now_() >= keeper_.check_ns) {
    check(store);
  }
  return std::min(keeper_.renewal_ns, keeper_.check_ns);
}

bool HostChannel::is_wanted() const {
  return now_() < table_->wanted_until_ns;
}

int64_t HostChannel::period_ns() const {
  const bool fast = now_() < fast_until_ns_ || is_wanted() || keeper_.cut_off_ns != 0;
  return fast ? std::min(kFastNs, settings_.lease_ns / 10) : settings_.lease_ns / 10;
}

// A connection keeps the order of requests: the answer to listen() shows that the store has the
// message, though it does not answer to `set`. If the lease had ended, other hosts may have
// declared this host lost, and may have ended since. Then ranks of this host wait until all other
// hosts have been heard of.
void HostChannel::renew(Store& store) {
  const auto start = now_();
  keeper_.renewal_ns = start + period_ns();
  store.set({host_key(keeper_.host_token)}, message());
  if (!keeper_.is_listed) {
    store.append(kHosts, join_fields({std::to_string(keeper_.host_token)}));
    keeper_.is_listed = true;
  }
  listen(store);
  const int64_t renewed_ns = table_->renewed_ns;
  if (keeper_.cut_off_ns == 0 && start - renewed_ns > settings_.lease_ns) {
    keeper_.cut_off_ns = start;
    for (auto& host : keeper_.others) {
      host.has_answered = false;
      host.silent_ns = 0;
    }
    post(store, kCall, std::to_string(keeper_.host_token));
    keeper_.check_ns = 0;
  }
  if (keeper_.cut_off_ns == 0) {
    table_->renewed_ns = std::max(renewed_ns, start);
  }
}

// The next hosts of the ring. All hosts if one of these has been silent for long, if this host was
// cut off, and now and then if a rank waits: then all hosts read all hosts.
std::size_t HostChannel::num_watched() const {
  const auto near = std::min(kNumWatched, keeper_.others.size());
  const auto end = keeper_.others.begin() + static_cast<std::ptrdiff_t>(near);
  const bool all = keeper_.cut_off_ns != 0 || (is_wanted() && now_() >= keeper_.read_all_ns) ||
                   std::any_of(keeper_.others.begin(), end, [this](const Host& host) {
                     return host.silent_ns > settings_.lease_ns / 3;
                   });
  return all ? keeper_.others.size() : near;
}

void HostChannel::check(Store& store) {
  const auto num_hosts = num_watched();
  std::vector<Host*> hosts;
  for (std::size_t i = 0; i < num_hosts; ++i) {
    hosts.push_back(&keeper_.others[i]);
  }
  const auto is_listed = [](const Host* host) { return host->is_listed; };
  if (!std::all_of(hosts.begin(), hosts.end(), is_listed)) {
    read_list(store);
  }
  std::vector<std::string> keys;
  for (const auto* host : hosts) {
    if (host->is_listed) {
      keys.push_back(host_key(host->token));
    }
  }
  const auto start = now_();
  const auto texts = keys.empty() ? std::vector<std::string>() : store.multi_get(keys);
  const auto end = now_();
  keeper_.is_prompt = end - start < kPromptNs;
  const auto longest_gap = settings_.lease_ns / 10 + kPromptNs;
  bool any_lost = false;
  bool all_have_answered = true;
  auto text = texts.begin();
  for (auto* host : hosts) {
    if (keeper_.is_prompt && host->checked_ns != 0) {
      host->silent_ns += std::min(start - host->checked_ns, longest_gap);
    }
    host->checked_ns = keeper_.is_prompt ? start : 0;
    if (host->is_listed) {
      absorb(*host, *text++);  // a new message resets `silent_ns`
    }
    host->silent_ns = host->has_left ? 0 : host->silent_ns;
    all_have_answered = all_have_answered && (host->has_answered || host->has_left);
    any_lost = any_lost || host->silent_ns >= settings_.lease_ns;
  }
  const auto many = static_cast<int64_t>(num_hosts) * kReadOfHostNs;
  keeper_.check_ns = start + period_ns();
  if (num_hosts == keeper_.others.size()) {
    table_->read_ns = end;
    keeper_.read_all_ns = start + many;
  }
  const auto& next = keeper_.others.front();
  if (any_lost) {
    // Hosts beyond the next ones of the ring have been watched since one of these became silent.
    const auto is_lost = [this](const Host& host) {
      return host.silent_ns >= settings_.lease_ns / 2;
    };
    declare_lost(store, is_lost, 0);
  } else if (keeper_.cut_off_ns != 0 && all_have_answered) {
    keeper_.cut_off_ns = 0;
    table_->renewed_ns = end;
  } else if (keeper_.cut_off_ns != 0 && end - keeper_.cut_off_ns > settings_.lease_ns / 3 + many) {
    const auto is_lost = [](const Host& host) { return !host.has_answered && !host.has_left; };
    declare_lost(store, is_lost, end - keeper_.cut_off_ns);
  } else if (!next.ranks.empty()) {
    if (const auto failure = probe_->compare_calls(next.ranks.front(), next.calls)) {
      post_failure(store, *failure);
    }
  }
}

void HostChannel::declare_lost(
    Store& store, const std::function<bool(const Host&)>& is_lost, int64_t silent_ns) {
  std::vector<int> ranks;
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

// Four fields: a counter, a state, calls, and the ranks. Each rank has its number, activity,
// progress, and its introduction unless ranks have met in a collective call.
std::string HostChannel::message(bool leaves) const {
  std::vector<std::string> ranks;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    const auto& entry = table_->rank(rank);
    if (entry.place == HostTable::Place::kThisHost) {
      ranks.push_back(std::to_string(rank));
      ranks.push_back(std::to_string(entry.activity.load()));
      ranks.push_back(std::to_string(entry.progress.load()));
      ranks.push_back(entry.introduction.read());
    }
  }
  const bool is_complete =
      keeper_.count >= settings_.world_size || table_->stage != HostTable::Stage::kGathering;
  const bool is_many = table_->stage == HostTable::Stage::kManyHosts;
  // The time is a counter that another keeper of this host can continue.
  return join_fields(
      {std::to_string(now_()),
       leaves        ? kLeft
       : is_complete ? kComplete
                     : kIncomplete,
       is_many ? probe_->calls() : std::string(),
       join_fields(ranks)});
}

void HostChannel::absorb(Host& host, const std::string& message) {
  if (!host.counter.empty() && message.starts_with(join_fields({host.counter}))) {
    return;
  }
  const auto fields = split_fields(message);
  if (fields.size() != 4) {
    return;
  }
  const auto now = now_();
  const bool learns_ranks = !host.is_complete;
  host.counter = fields[0];
  host.is_complete = host.is_complete || fields[1] != kIncomplete;
  host.has_left = fields[1] == kLeft;
  host.calls = fields[2];
  host.has_answered = true;
  host.silent_ns = 0;
  if (learns_ranks) {
    host.ranks.clear();
  }
  const auto ranks = split_fields(fields[3]);
  for (std::size_t i = 0; i + 3 < ranks.size(); i += 4) {
    const auto rank = to_number<int>(ranks[i]).value_or(-1);
    const auto activity = to_number<uint64_t>(ranks[i + 1]);
    const auto progress = to_number<uint64_t>(ranks[i + 2]);
    if (rank < 0 || rank >= settings_.world_size || !activity || !progress) {
      continue;
    }
    if (learns_ranks) {
      host.ranks.push_back(rank);  // a message has them in order
    }
    auto& entry = table_->rank(rank);
    if (entry.place == HostTable::Place::kThisHost) {
      continue;
    }
    if (entry.activity.exchange(*activity) != *activity || entry.since_ns == 0) {
      entry.since_ns = now;  // clocks of other machines are not comparable
    }
    entry.progress = *progress;
    entry.heard_ns = now;
    const auto who = entry.place == HostTable::Place::kUnknown
                         ? Introduction::from_text(ranks[i + 3])
                         : std::nullopt;
    if (who && who->rank == rank) {
      table_->introduce(*who, HostTable::Place::kOtherHost);
    }
  }
}

}  // namespace ddpx::health
