#include "topology.h"

#include <unordered_map>

namespace ddpx::shm {

Topology group_by_id(const std::vector<std::string>& ids) {
  Topology topology;
  std::unordered_map<std::string, int> host_of_id;
  for (const auto& id : ids) {
    const auto [entry, is_new] = host_of_id.emplace(id, static_cast<int>(topology.hosts.size()));
    if (is_new) {
      topology.hosts.emplace_back();
    }
    auto& host = topology.hosts[entry->second];
    topology.local_rank_of.push_back(static_cast<int>(host.size()));
    host.push_back(topology.size());
    topology.host_of.push_back(entry->second);
  }
  return topology;
}

}  // namespace ddpx::shm
