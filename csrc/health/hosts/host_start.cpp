// How a rank finds its host, and the other hosts of the group.
#include <algorithm>
#include <stdexcept>
#include <unordered_map>

#include "../machine/fields.h"
#include "channel_keys.h"
#include "host_channel.h"

namespace ddpx::health {

// ---- the host of this rank ----------------------------------------------------------------------

// Joins the host of one of these ranks. The page of each rank has the decision about its host. So a
// rank that returns from the collective call sees what other ranks have decided through the store
// meanwhile, and the reverse. Returns false if no host is found.
bool HostChannel::join(const std::vector<Introduction>& ranks) {
  const std::lock_guard<std::mutex> lock(join_mutex_);
  if (is_decided_) {
    return true;
  }
  const auto found = find_table(ranks);
  if (!found) {
    return false;
  }
  // Another rank may have made the page of this rank a host's meanwhile.
  const auto own = probe_->open(settings_.own);
  table_ = own->decide_host(found->host) == found->host ? found : own;
  table_->introduce(settings_.own, table_->host);
  is_decided_ = true;
  return true;
}

// The table of the first host that a rank has joined whose page this rank can open. If there is
// none, the first page that this rank can open becomes a host's. Ranks that claim the same machine
// and cannot open each other's pages have different hosts: other users, or virtual machines that
// are copies of each other.
std::shared_ptr<HostTable> HostChannel::find_table(const std::vector<Introduction>& ranks) const {
  std::shared_ptr<HostTable> first;
  uint64_t first_token = 0;
  for (const auto& rank : ranks) {
    const auto page = probe_->open(rank);
    const uint64_t host = page ? page->host.load() : 0;
    const auto has_table = [host](const Introduction& each) { return each.token == host; };
    if (host != 0) {
      const auto owner = std::find_if(ranks.begin(), ranks.end(), has_table);
      if (auto table = owner != ranks.end() ? probe_->open(*owner) : nullptr) {
        return table;
      }
    } else if (page && !first) {
      first = page;
      first_token = rank.token;
    }
  }
  const bool is_new = first && first->decide_host(first_token) == first_token;
  return is_new ? first : nullptr;
}

// ---- the start in a collective call -------------------------------------------------------------

uint64_t HostChannel::find_host(const std::vector<Introduction>& ranks) {
  if (!join(ranks)) {
    join({settings_.own});
  }
  return table_->host;
}

void HostChannel::meet(const std::vector<Introduction>& ranks, const std::vector<uint64_t>& hosts) {
  if (!is_decided_) {
    throw std::logic_error("meet() needs the host of this rank: call find_host() before");
  }
  const auto num_ranks =
      std::min<std::size_t>(hosts.size(), static_cast<std::size_t>(settings_.world_size));
  for (const auto& rank : ranks) {
    const auto place = static_cast<std::size_t>(rank.rank);
    if (rank.rank >= 0 && place < num_ranks && hosts[place] != 0) {
      table_->introduce(rank, hosts[place]);
    }
  }
  end_start();
}

// ---- the start through the store ----------------------------------------------------------------

bool HostChannel::must_introduce() const {
  return !is_introduced_ && !(is_decided_ && table_->stage != HostTable::Stage::kGathering);
}

void HostChannel::introduce(Store& store) {
  const auto& own = settings_.own;
  for (int number = 0; !is_decided_; ++number) {
    const auto key = candidate_key(own.process.machine, number);
    if (const auto rank = Introduction::from_text(store.set_first(key, own.to_text()))) {
      join({*rank});
    }
  }
  store.append(kRanks, join_fields({own.to_text(), std::to_string(table_->host)}));
  store.add(kCount, 1);
  listen(store);
  is_introduced_ = true;  // last: an error before it leads to another attempt
}

// Waits for the other ranks. While a rank needs them, reads which ranks have come.
int64_t HostChannel::gather(Store& store) {
  table_->renewed_ns = now_();
  listen(store);
  const auto count = store.add(kCount, 0);
  const bool all_came = count >= settings_.world_size;
  const bool has_changed = count != keeper_.num_read && now_() >= keeper_.read_all_ns;
  if (all_came || (is_wanted() && has_changed)) {
    keeper_.num_read = count;
    table_->between_reads_ns = settings_.world_size * times::kReadPerRank;  // the list is long
    keeper_.read_all_ns = now_() + table_->between_reads_ns;
    if (read_ranks(store)) {
      end_start();
      return now_();
    }
  }
  return now_() + times::kCountPoll;
}

// Returns whether all ranks are known.
bool HostChannel::read_ranks(Store& store) {
  const auto fields = split_fields(store.get(kRanks).value_or(""));
  for (std::size_t i = 0; i + 1 < fields.size(); i += 2) {
    const auto rank = Introduction::from_text(fields[i]);
    const auto host = to_number<uint64_t>(fields[i + 1]);
    if (rank && host && rank->rank >= 0 && rank->rank < settings_.world_size) {
      table_->introduce(*rank, *host);
    }
  }
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    if (table_->rank(rank).host == 0) {
      return false;
    }
  }
  return true;
}

// ---- the end of both starts ---------------------------------------------------------------------

// The hosts of all ranks are known. All ranks of a host write the same.
void HostChannel::end_start() {
  int64_t not_renewed = 0;
  table_->renewed_ns.compare_exchange_strong(not_renewed, now_());
  auto stage = HostTable::Stage::kOneHost;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    auto& entry = table_->rank(rank);
    if (table_->is_member(rank)) {
      int32_t no_keeper = 0;
      table_->keeper_plus_1.compare_exchange_strong(no_keeper, rank + 1);
    } else if (entry.host != 0) {
      int64_t not_heard = 0;
      entry.heard_ns.compare_exchange_strong(not_heard, now_());
      stage = HostTable::Stage::kManyHosts;
    }
  }
  if (stage == HostTable::Stage::kOneHost) {
    table_->between_reads_ns = 0;  // nothing is read any more
  }
  table_->stage = stage;
}

// The ring: hosts by their lowest ranks, from this host on.
void HostChannel::build_ring() {
  auto& others = keeper_.others;
  int lowest = settings_.own.rank;  // of this host
  std::unordered_map<uint64_t, std::size_t> places;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    const uint64_t token = table_->rank(rank).host;
    if (table_->is_member(rank)) {
      lowest = std::min(lowest, rank);
    }
    if (token == 0 || table_->is_member(rank)) {
      continue;
    }
    const auto [place, is_new] = places.try_emplace(token, others.size());
    if (is_new) {
      others.push_back({.token = token});
    }
    others[place->second].ranks.push_back(rank);
  }
  const auto next = std::find_if(others.begin(), others.end(), [lowest](const Host& host) {
    return host.ranks.front() > lowest;
  });
  std::rotate(others.begin(), next, others.end());
  keeper_.read_all_ns = 0;
  table_->between_reads_ns = static_cast<int64_t>(others.size()) * times::kReadPerHost;
}

}  // namespace ddpx::health
