#include "topology.h"

#include <algorithm>

namespace ddpx::shm {

Topology group_by_reachability(const std::vector<std::vector<bool>>& reached) {
  const auto size = reached.size();
  Topology topology;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto shares_with = [&](int other) {
      return reached[rank][other] && reached[other][rank];
    };
    const auto fits = [&](const std::vector<int>& host) {
      return std::all_of(host.begin(), host.end(), shares_with);
    };
    const auto found = std::find_if(topology.hosts.begin(), topology.hosts.end(), fits);
    const auto host = found - topology.hosts.begin();
    if (found == topology.hosts.end()) {
      topology.hosts.emplace_back();
    }
    topology.host_of.push_back(static_cast<int>(host));
    topology.local_rank_of.push_back(static_cast<int>(topology.hosts[host].size()));
    topology.hosts[host].push_back(static_cast<int>(rank));
  }
  return topology;
}

}  // namespace ddpx::shm
