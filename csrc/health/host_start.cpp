// How a rank finds its host, and the other hosts of the group.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "channel_keys.h"
#include "fields.h"
#include "host_channel.h"

namespace ddpx::health {
namespace {

// Between requests for the count of ranks that have come.
constexpr int64_t kFirstPollNs = 20'000'000;
constexpr int64_t kLongestPollNs = 300'000'000;
constexpr int64_t kWantedPollNs = 100'000'000;  // while a rank needs them

}  // namespace

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

}  // namespace ddpx::health
