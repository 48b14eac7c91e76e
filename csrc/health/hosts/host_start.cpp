// HostChannel: the start of a rank, until it knows its host and the other hosts.
#include <algorithm>
#include <stdexcept>
#include <unordered_map>

#include "../machine/record.h"
#include "host_channel.h"

namespace ddpx::health {

// ---- the host of this rank ----------------------------------------------------------------------

// Joins the host of one of these ranks. Returns false if no host is found. The decision about the
// host of a rank is on the page of the rank. So ranks that start through the store, and ranks that
// return from the collective call, agree.
bool HostChannel::join(const std::vector<Introduction>& ranks) {
  const std::lock_guard<std::mutex> lock(join_mutex_);
  if (is_decided_) {
    return true;
  }
  const auto found = find_table(ranks);
  if (!found) {
    return false;
  }
  // Another rank may have made the page of this rank the page of a host.
  const auto own = probe_->open(settings_.own);
  table_ = own->decide_host(found->host) == found->host ? found : own;
  table_->introduce(settings_.own, table_->host);
  is_decided_ = true;
  return true;
}

// Finds the host of the first rank that has a host, among the ranks whose pages this rank can open.
// If no such rank has a host, the first of these pages becomes the page of a host. Ranks that claim
// the same machine and cannot open each other's pages have different hosts: ranks of different
// users, or of copies of a virtual machine.
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
    if (const auto rank = Introduction::decode(store.set_first(key, own.encode()))) {
      join({*rank});
    }
  }
  store.append(kRanks, encode(own.encode(), table_->host.load()));
  store.add(kCount, 1);
  listen(store);
  is_introduced_ = true;  // last: after an error, the thread tries again
}

// Polls the number of ranks that have come. Reads the list of ranks when all have come, and before
// if a rank needs the list.
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
  const auto all = store.get(kRanks).value_or("");
  std::string_view rest = all;
  std::string introduction;
  uint64_t host = 0;
  while (decode(rest, introduction, host)) {
    const auto rank = Introduction::decode(introduction);
    if (rank && rank->rank >= 0 && rank->rank < settings_.world_size) {
      table_->introduce(*rank, host);
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
    table_->between_reads_ns = 0;  // there are no more reads
  }
  table_->stage = stage;
}

// Orders the other hosts by their lowest ranks, from this host on.
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
