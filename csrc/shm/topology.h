// A value that says which ranks share memory. It is the same on all ranks.
#pragma once

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

// reached[i][j]: rank i has mapped rank j's memory. A rank goes to the first host where it shares
// memory with every rank in both directions, else to a new host. All ranks of a host can therefore
// reach each other, even where reachability is not transitive.
Topology group_by_reachability(const std::vector<std::vector<bool>>& reached);

}  // namespace ddpx::shm
