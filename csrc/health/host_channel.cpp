#include "host_channel.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "fields.h"

namespace ddpx::health {
namespace {

constexpr int64_t kFirstPollNs = 20'000'000;
constexpr int64_t kLongestPollNs = 300'000'000;
constexpr int64_t kWantedPollNs = 100'000'000;
constexpr int64_t kFastNs = 500'000'000;       // between messages while a rank needs them
constexpr int64_t kCallNs = 5'000'000'000;     // how long a call makes hosts write fast
constexpr int64_t kPromptNs = 1'000'000'000;   // a slower answer says nothing about other hosts
constexpr int64_t kTurnNs = 500'000'000;       // between ranks that take over from an ended keeper
constexpr int64_t kReadOfHostNs = 10'000'000;  // many hosts read each other less often
constexpr std::size_t kNumWatched = 9;         // so that eight adjacent hosts can be lost at once

constexpr const char* kHosts = "ddpx/health/hosts";  // tokens of hosts
constexpr const char* kCount = "ddpx/health/count";  // of ranks that have introduced themselves

// States of a host, in its messages.
constexpr const char* kIncomplete = "incomplete";  // ranks may be missing in the message
constexpr const char* kComplete = "complete";
constexpr const char* kLeft = "left";

// Kinds of events.
constexpr const char* kFailure = "failure";
constexpr const char* kCall = "call";
constexpr const char* kLeaving = "leaving";

// Introductions of all ranks that claim this machine.
std::string machine_key(const std::string& machine) {
  return "ddpx/health/machine/" + machine;
}

// The last message of a host.
std::string host_key(uint64_t token) {
  return "ddpx/health/host/" + std::to_string(token);
}

std::string kind_of(const std::string& event) {
  const auto fields = split_fields(event);
  return fields.size() == 2 ? fields[0] : std::string();
}

// Events have numbers without gaps, and the first text for a number stands. So all hosts see the
// same order.
std::string event_key(uint32_t number) {
  return "ddpx/health/event/" + std::to_string(number);
}

std::string wake_key_of(uint64_t token) {
  return "ddpx/health/wake/" + std::to_string(token);
}

}  // namespace

HostChannel::HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now)
    : settings_(std::move(settings)), probe_(std::move(probe)), now_(std::move(now)) {}

// ---- the start ----------------------------------------------------------------------------------

// The host of a rank is that of the first rank whose status page it can open. Ranks that claim the
// same machine and cannot open each other's pages have different hosts: other users, or virtual
// machines that are copies of each other.
bool HostChannel::try_host_of(const Introduction& rank) {
  table_ = rank.process.machine == settings_.own.process.machine ? probe_->open(rank) : nullptr;
  keeper_.host_token = rank.token;
  return table_ != nullptr;
}

uint64_t HostChannel::find_host(const std::vector<Introduction>& ranks) {
  const auto opens = [this](const Introduction& rank) { return try_host_of(rank); };
  if (std::none_of(ranks.begin(), ranks.end(), opens)) {
    try_host_of(settings_.own);
  }
  return keeper_.host_token;
}

// All ranks of a host write the same.
void HostChannel::meet(const std::vector<uint64_t>& hosts) {
  const auto now = now_();
  std::unordered_map<uint64_t, std::size_t> places;  // in `others`
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    const auto token = hosts[static_cast<std::size_t>(rank)];
    auto& entry = table_->rank(rank);
    if (token == keeper_.host_token) {
      entry.place = HostTable::Place::kThisHost;
      int32_t none = 0;
      if (table_->keeper_plus_1.compare_exchange_strong(none, rank + 1)) {
        table_->renewed_ns = now;
      }
    } else if (token != 0) {
      entry.place = HostTable::Place::kOtherHost;
      entry.heard_ns = std::max<int64_t>(entry.heard_ns, now);
      const auto [found, is_new] = places.try_emplace(token, keeper_.others.size());
      if (is_new) {
        keeper_.others.push_back({.token = token, .is_complete = true});
      }
      keeper_.others[found->second].ranks.push_back(rank);
    }
  }
  order_ring();
  const bool is_alone = keeper_.others.empty();
  table_->stage = is_alone ? HostTable::Stage::kOneHost : HostTable::Stage::kManyHosts;
  is_ready_ = true;
}

void HostChannel::introduce(Store& store) {
  const auto& own = settings_.own;
  const auto key = machine_key(own.process.machine);
  store.append(key, join_fields({own.to_text()}));
  std::vector<Introduction> known;
  for (const auto& text : split_fields(store.get(key).value_or(""))) {
    if (const auto rank = Introduction::from_text(text)) {
      known.push_back(*rank);
    }
  }
  const bool is_first = find_host(known) == own.token;
  table_->introduce(own, HostTable::Place::kThisHost);
  if (is_first) {
    table_->renewed_ns = now_();
    table_->keeper_plus_1 = own.rank + 1;
    store.set({host_key(own.token)}, message());
    store.append(kHosts, join_fields({std::to_string(own.token)}));
    keeper_.is_listed = true;
  }
  keeper_.count = store.add(kCount, 1);
  listen(store);
  is_ready_ = true;  // last: an error before it leads to another attempt
}

int64_t HostChannel::gather(Store& store) {
  table_->renewed_ns = now_();
  listen(store);
  if (keeper_.count < settings_.world_size) {
    keeper_.count = store.add(kCount, 0);
  }
  const bool all_came = keeper_.count >= settings_.world_size;
  const int num_members = count(HostTable::Place::kThisHost);
  if (all_came || num_members != keeper_.num_members) {
    store.set({host_key(keeper_.host_token)}, message());
    keeper_.num_members = num_members;
  }
  if (all_came || is_wanted()) {
    read_hosts(store);
  }
  if (all_came && count(HostTable::Place::kUnknown) == 0) {
    table_->stage =
        keeper_.others.empty() ? HostTable::Stage::kOneHost : HostTable::Stage::kManyHosts;
    return now_();
  }
  keeper_.poll_ns = std::clamp(keeper_.poll_ns * 3 / 2, kFirstPollNs, kLongestPollNs);
  return now_() + (is_wanted() ? std::min(keeper_.poll_ns, kWantedPollNs) : keeper_.poll_ns);
}

int HostChannel::count(HostTable::Place place) const {
  int found = 0;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    found += table_->rank(rank).place == place ? 1 : 0;
  }
  return found;
}

// Finds out which hosts have written a message: a request for another key would wait.
void HostChannel::read_list(Store& store) {
  const bool may_be_new = keeper_.count > 0;  // the ranks have not met in a collective call
  for (const auto& text : split_fields(store.get(kHosts).value_or(""))) {
    const auto token = to_number<uint64_t>(text).value_or(keeper_.host_token);
    auto found =
        std::find_if(keeper_.others.begin(), keeper_.others.end(), [token](const Host& host) {
          return host.token == token;
        });
    if (found != keeper_.others.end()) {
      found->is_listed = true;
    } else if (may_be_new && token != keeper_.host_token) {
      keeper_.others.push_back({.token = token, .is_listed = true});
    }
  }
}

// Reads the messages of hosts whose ranks are not all known.
void HostChannel::read_hosts(Store& store) {
  read_list(store);
  std::vector<Host*> incomplete;
  std::vector<std::string> keys;
  for (auto& host : keeper_.others) {
    if (!host.is_complete) {
      incomplete.push_back(&host);
      keys.push_back(host_key(host.token));
    }
  }
  const auto texts = keys.empty() ? std::vector<std::string>() : store.multi_get(keys);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    absorb(*incomplete[i], texts[i]);
  }
  order_ring();
}

// The ring: hosts by their lowest ranks, from this host on.
void HostChannel::order_ring() {
  const auto place = [own = settings_.own.rank](const Host& host) {
    const int first = host.ranks.empty() ? INT32_MAX : host.ranks.front();
    return std::pair(first < own, first);
  };
  std::sort(keeper_.others.begin(), keeper_.others.end(), [place](const Host& a, const Host& b) {
    return place(a) < place(b);
  });
}

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
