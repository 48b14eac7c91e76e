// Which ranks share memory, as all ranks agree on it: a pure value.
#pragma once

#include <vector>

namespace ddpx::shm {

struct Topology {
  std::vector<std::vector<int>> hosts;  // the ranks of each host, ascending; hosts by first rank
  std::vector<int> host_of;             // per rank
  std::vector<int> local_rank_of;       // per rank: its place within its host

  int size() const {
    return static_cast<int>(host_of.size());
  }

  const std::vector<int>& neighbours(int rank) const {
    return hosts[host_of[rank]];
  }
};

// reached[i][j]: rank i has mapped rank j's memory. A rank joins the first host all of whose ranks
// it shares memory with, in both directions; otherwise it opens one. So everyone on a "host" can
// reach everyone else there, even where reaching is not transitive.
Topology group_by_reach(const std::vector<std::vector<bool>>& reached);

}  // namespace ddpx::shm
