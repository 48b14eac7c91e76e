// A value that says which ranks share memory. It is the same on all ranks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../count.h"

namespace ddpx::shm {

struct Topology {
  std::vector<std::vector<int>> hosts;  // ascending ranks of each host; hosts sorted by first rank
  std::vector<int> host_of;             // per rank
  std::vector<int> local_rank_of;       // per rank: its index within its host
  std::vector<int> in_job = {};         // per rank: its rank in the job; empty: the same rank

  int size() const {
    return static_cast<int>(host_of.size());
  }

  int rank_in_job(int rank) const {
    const auto at = static_cast<std::size_t>(rank);
    return at < in_job.size() ? in_job[at] : rank;
  }

  // For texts: "rank 1", or "rank 1 (rank 3 of the job)", or "ranks 0 and 1 (ranks 2 and 3 of the
  // job)".
  std::string name(const std::vector<int>& ranks) const {
    std::vector<int> others;
    for (const int rank : ranks) {
      others.push_back(rank_in_job(rank));
    }
    return list_ranks(ranks) + (others == ranks ? "" : " (" + list_ranks(others) + " of the job)");
  }

  // All ranks on the host of `rank`, including `rank`.
  const std::vector<int>& local_ranks(int rank) const {
    return hosts[host_of[rank]];
  }
};

// Ranks with equal ids share a host. `ids` has one id per rank.
Topology group_by_id(const std::vector<std::string>& ids);

}  // namespace ddpx::shm
