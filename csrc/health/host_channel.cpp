#include "host_channel.h"

#include <algorithm>
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

}  // namespace

HostChannel::HostChannel(Settings settings, std::shared_ptr<HostProbe> probe, Clock now)
    : settings_(std::move(settings)), probe_(std::move(probe)), now_(std::move(now)) {}

// ---- the start ----------------------------------------------------------------------------------

// The host of a rank is that of the first introduced rank whose status page it can open. Ranks that
// claim the same machine and cannot open each other's pages have different hosts: other users, or
// virtual machines that are copies of each other.
void HostChannel::introduce(Store& store) {
  const auto& own = settings_.own;
  const auto key = machine_key(own.process.machine);
  store.append(key, join_fields({own.to_text()}));
  for (const auto& text : split_fields(store.get(key).value_or(""))) {
    const auto first = Introduction::from_text(text);
    table_ = first ? probe_->open(*first) : nullptr;
    if (table_) {
      keeper_.host_token = first->token;
      break;
    }
  }
  if (!table_) {  // the store has lost the introduction
    table_ = probe_->open(own);
    keeper_.host_token = own.token;
  }
  table_->introduce(own, HostTable::Place::kThisHost);
  if (keeper_.host_token == own.token) {
    table_->renewed_ns = now_();
    table_->keeper_plus_1 = own.rank + 1;
    // Before the host is listed: who reads the list expects messages.
    store.set(host_key(own.token), message());
    store.append(kHosts, join_fields({std::to_string(own.token)}));
  }
  keeper_.count = store.add(kCount, 1);
  hear_posted(store);
  table_ptr_ = table_.get();  // last: an error before it leads to another attempt
}

int64_t HostChannel::gather(Store& store) {
  table_->renewed_ns = now_();
  hear_posted(store);
  if (keeper_.count < settings_.world_size) {
    keeper_.count = store.add(kCount, 0);
  }
  const bool all_came = keeper_.count >= settings_.world_size;
  const int num_members = count(HostTable::Place::kThisHost);
  if (all_came || num_members != keeper_.num_members) {
    store.set(host_key(keeper_.host_token), message());
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

// Reads the messages of hosts whose ranks are not all known.
void HostChannel::read_hosts(Store& store) {
  for (const auto& text : split_fields(store.get(kHosts).value_or(""))) {
    const auto token = to_number<uint64_t>(text).value_or(keeper_.host_token);
    const bool is_known =
        token == keeper_.host_token ||
        std::any_of(keeper_.others.begin(), keeper_.others.end(), [token](const Host& host) {
          return host.token == token;
        });
    if (!is_known) {
      keeper_.others.emplace_back().token = token;
    }
  }
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
  // The ring: hosts by their lowest ranks, from this host on.
  const int own = settings_.own.rank;
  std::sort(keeper_.others.begin(), keeper_.others.end(), [own](const Host& a, const Host& b) {
    const auto place = [own](const Host& host) {
      const int first = host.ranks.empty() ? INT32_MAX : host.ranks.front();
      return std::pair(first < own, first);
    };
    return place(a) < place(b);
  });
}

// ---- events -------------------------------------------------------------------------------------

void HostChannel::post(Store& store, const std::string& kind, const std::string& text) {
  const auto event = join_fields({kind, text});
  while (true) {
    const uint32_t number = table_->next_event;
    const auto standing = store.set_first(event_key(number), event);
    handle(number, standing);
    // One call is as good as another one.
    if (standing == event || kind_of(standing) == kFailure || kind_of(standing) == kind) {
      return;
    }
  }
}

void HostChannel::post_failure(Store& store, const std::string& text) {
  post(store, kFailure, text);
}

void HostChannel::leave(Store& store) {
  if (table_->keeper_plus_1 == settings_.own.rank + 1) {
    store.set(host_key(keeper_.host_token), message(/*leaves=*/true));
  }
  if (settings_.own.rank == 0) {
    post(store, kLeaving, {});
  }
}

// Polls: torch's store logs two warnings whenever a wait for a key times out, and a wait cannot be
// cancelled when the process group is destroyed.
bool HostChannel::listen(Store& store) {
  if (now_() - table_->renewed_ns > period_ns()) {
    write_message(store, now_());
  }
  return hear_posted(store);
}

bool HostChannel::hear_posted(Store& store) {
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
  const auto* table = this->table();
  if (table == nullptr || table->stage == HostTable::Stage::kOneHost) {
    return false;
  }
  const int keeper = table->keeper_plus_1 - 1;
  const int own = settings_.own.rank;
  if (keeper == own) {
    return true;
  }
  const bool keeper_lives = keeper >= 0 && keeper < settings_.world_size && probe_->lives(keeper);
  int64_t num_before = 0;
  for (int rank = 0; rank < own; ++rank) {
    const bool may_take_over = table->rank(rank).place == HostTable::Place::kThisHost &&
                               rank != keeper && probe_->lives(rank);
    num_before += may_take_over ? 1 : 0;
  }
  const auto patience =
      keeper_lives ? settings_.lease_ns / 5 * (1 + num_before) : kTurnNs * num_before;
  return now_() - table->renewed_ns > patience;
}

int64_t HostChannel::step(Store& store) {
  if (const auto failure = table_->declared()) {
    if (!table_->failure_posted) {
      post_failure(store, *failure);
    }
    return kNever;
  }
  if (table_->stage == HostTable::Stage::kOneHost) {
    return kNever;
  }
  const int keeper = table_->keeper_plus_1 - 1;
  const bool another_keeps = keeper >= 0 && keeper < settings_.own.rank &&
                             now_() - table_->renewed_ns < settings_.lease_ns / 5;
  if (another_keeps) {
    return kNever;
  }
  table_->keeper_plus_1 = settings_.own.rank + 1;
  if (table_->stage != HostTable::Stage::kManyHosts) {
    return gather(store);
  }
  if (keeper_.others.empty()) {  // this rank has taken over
    read_hosts(store);
  }
  call_if_wanted(store);
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
  const auto now = now_();
  const bool fast = now < fast_until_ns_ || is_wanted() || cut_off_ns_ != 0;
  return fast ? std::min(kFastNs, settings_.lease_ns / 10) : settings_.lease_ns / 10;
}

// A call lets all hosts write at once, and then twice a second: a host that lives is then heard of
// soon, though nobody waits on it. Without prompt answers this would be of no use.
void HostChannel::call_if_wanted(Store& store) {
  if (is_wanted() && keeper_.is_prompt && now_() > fast_until_ns_ - kPromptNs) {
    post(store, kCall, std::to_string(keeper_.host_token));
    keeper_.check_ns = 0;
  }
}

void HostChannel::renew(Store& store) {
  const auto start = now_();
  keeper_.renewal_ns = start + period_ns();
  if (!write_message(store, start) || cut_off_ns_ != 0) {
    return;
  }
  // The lease had ended. Other hosts may have declared this host lost, and may have ended since. So
  // ranks of this host wait until all other hosts have been heard of.
  cut_off_ns_ = start;
  for (auto& host : keeper_.others) {
    host.has_answered = false;
    host.silent_ns = 0;
  }
  post(store, kCall, std::to_string(keeper_.host_token));
  keeper_.check_ns = 0;
}

// Both threads write messages, so that one that waits for a slow answer does not hold up the lease.
// A connection keeps the order of requests: the answer to `hear_posted` shows that the store has
// the message, though it does not answer to `set`. Returns whether the lease had ended.
bool HostChannel::write_message(Store& store, int64_t start_ns) {
  store.set(host_key(keeper_.host_token), message());
  hear_posted(store);
  const int64_t renewed_ns = table_->renewed_ns;
  const bool had_ended = start_ns - renewed_ns > settings_.lease_ns;
  if (!had_ended && cut_off_ns_ == 0) {
    table_->renewed_ns = std::max(renewed_ns, start_ns);
  }
  return had_ended;
}

// The next hosts of the ring; all hosts where one of these has been silent for long.
std::vector<std::size_t> HostChannel::watched() const {
  std::vector<std::size_t> found;
  const auto num_hosts = keeper_.others.size();
  const auto near = std::min(kNumWatched, num_hosts);
  const bool silent =
      std::any_of(keeper_.others.begin(), keeper_.others.begin() + near, [this](const Host& host) {
        return host.silent_ns > settings_.lease_ns / 3;
      });
  const auto end = silent || is_wanted() || cut_off_ns_ != 0 ? num_hosts : near;
  for (std::size_t i = 0; i < end; ++i) {
    found.push_back(i);
  }
  return found;
}

void HostChannel::check(Store& store) {
  const auto indices = watched();
  std::vector<std::string> keys;
  for (const auto index : indices) {
    keys.push_back(host_key(keeper_.others[index].token));
  }
  const auto start = now_();
  const auto texts = keys.empty() ? std::vector<std::string>() : store.multi_get(keys);
  const auto end = now_();
  keeper_.is_prompt = end - start < kPromptNs;
  const auto longest_gap = settings_.lease_ns / 10 + kPromptNs;
  std::vector<const Host*> lost;
  std::vector<const Host*> also_lost;
  bool all_have_answered = true;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    auto& host = keeper_.others[indices[i]];
    if (keeper_.is_prompt && host.checked_ns != 0) {
      host.silent_ns += std::min(start - host.checked_ns, longest_gap);
    }
    host.checked_ns = keeper_.is_prompt ? start : 0;
    absorb(host, texts[i]);  // a new message resets `silent_ns`
    host.silent_ns = host.has_left ? 0 : host.silent_ns;
    all_have_answered = all_have_answered && (host.has_answered || host.has_left);
    if (host.silent_ns >= settings_.lease_ns) {
      lost.push_back(&host);
    }
    // These have been watched since another host became silent.
    if (host.silent_ns >= settings_.lease_ns / 2) {
      also_lost.push_back(&host);
    }
  }
  const bool all = indices.size() == keeper_.others.size();
  if (all) {
    table_->read_ns = end;
  }
  const auto many = all ? static_cast<int64_t>(indices.size()) * kReadOfHostNs : 0;
  keeper_.check_ns = start + std::max(period_ns(), many);
  if (!lost.empty()) {
    declare_lost(store, also_lost, 0);
  } else if (cut_off_ns_ != 0 && all_have_answered) {
    cut_off_ns_ = 0;
    table_->renewed_ns = end;
  } else if (cut_off_ns_ != 0 && end - cut_off_ns_ > settings_.lease_ns / 3 + many) {
    for (const auto& host : keeper_.others) {
      if (!host.has_answered && !host.has_left) {
        lost.push_back(&host);
      }
    }
    declare_lost(store, lost, end - cut_off_ns_);
  } else {
    compare_calls(store);
  }
}

void HostChannel::declare_lost(
    Store& store, const std::vector<const Host*>& hosts, int64_t silent_ns) {
  std::vector<int> ranks;
  for (const auto* host : hosts) {
    ranks.insert(ranks.end(), host->ranks.begin(), host->ranks.end());
    silent_ns = std::max(silent_ns, host->silent_ns);
  }
  std::sort(ranks.begin(), ranks.end());
  if (!ranks.empty()) {
    post_failure(store, probe_->describe_lost(ranks, silent_ns));
  }
}

void HostChannel::compare_calls(Store& store) {
  if (keeper_.others.empty() || keeper_.others.front().ranks.empty()) {
    return;
  }
  const auto& next = keeper_.others.front();
  if (const auto failure = probe_->compare_calls(next.ranks.front(), next.calls)) {
    post_failure(store, *failure);
  }
}

// ---- messages -----------------------------------------------------------------------------------

// Four fields: a counter, a state, calls, and the ranks. Each rank has its introduction, activity
// and progress.
std::string HostChannel::message(bool leaves) const {
  std::string ranks;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    const auto& entry = table_->rank(rank);
    if (entry.place == HostTable::Place::kThisHost) {
      ranks += join_fields(
          {entry.introduction.read(),
           std::to_string(entry.activity.load()),
           std::to_string(entry.progress.load())});
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
       ranks});
}

void HostChannel::absorb(Host& host, const std::string& message) {
  const auto fields = split_fields(message);
  if (fields.size() != 4 || fields[0] == host.counter) {
    return;
  }
  const auto now = now_();
  host.counter = fields[0];
  host.is_complete = fields[1] != kIncomplete;
  host.has_left = fields[1] == kLeft;
  host.calls = fields[2];
  host.has_answered = true;
  host.silent_ns = 0;
  host.ranks.clear();
  const auto ranks = split_fields(fields[3]);
  for (std::size_t i = 0; i + 2 < ranks.size(); i += 3) {
    const auto who = Introduction::from_text(ranks[i]);
    const auto activity = to_number<uint64_t>(ranks[i + 1]);
    const auto progress = to_number<uint64_t>(ranks[i + 2]);
    if (!who || who->rank < 0 || who->rank >= settings_.world_size || !activity || !progress) {
      continue;
    }
    host.ranks.push_back(who->rank);
    auto& entry = table_->rank(who->rank);
    if (entry.place == HostTable::Place::kThisHost) {
      continue;
    }
    if (entry.activity.exchange(*activity) != *activity || entry.since_ns == 0) {
      entry.since_ns = now;  // clocks of other machines are not comparable
    }
    entry.progress = *progress;
    entry.heard_ns = now;
    if (entry.place == HostTable::Place::kUnknown) {
      table_->introduce(*who, HostTable::Place::kOtherHost);
    }
  }
  std::sort(host.ranks.begin(), host.ranks.end());
}

}  // namespace ddpx::health
