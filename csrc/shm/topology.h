// A value that says which ranks share memory. It is the same on all ranks.
#pragma once

#include <string>
#include <vector>

namespace ddpx::shm {

struct Topology {
  std::vector<std::vector<int>> hosts;  // ascending ranks of each host; hosts sorted by first rank
  std::vector<int> host_of;             // per rank
  std::vector<int> local_rank_of;       // per rank: its index within its host

  int size() const {
    return static_cast<int>(host_of.size());
  }

  // All ranks on the host of `rank`, including `rank`.
  const std::vector<int>& local_ranks(int rank) const {
    return hosts[host_of[rank]];
  }
};

// Ranks with equal ids share a host. `ids` has one id per rank.
Topology group_by_id(const std::vector<std::string>& ids);

}  // namespace ddpx::shm
