// At start-up, ranks detect which peers share memory, and compute the same topology from that.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "channel.h"
#include "home.h"
#include "topology.h"
#include "unix_socket.h"

namespace ddpx::shm {

struct RendezvousOptions {
  HomeSizes sizes;
  std::chrono::milliseconds timeout;
  // For tests: ranks with different identities do not connect to each other.
  std::string host_identity;
  std::vector<int> in_job = {};  // see Topology
};

// A rank on the same host.
struct LocalPeer {
  std::shared_ptr<HomeSegment> home;
  std::shared_ptr<Connection> connection;  // null for this rank itself
};

struct RendezvousResult {
  Topology topology;
  std::vector<LocalPeer> local_peers;  // indexed by local rank; includes this rank
};

// Collective over all ranks of the group. Throws kTimeout with the rank that did not arrive, and
// kOutOfMemory if the staging buffers cannot be allocated. All other ranks then throw kPeerLost.
RendezvousResult run_rendezvous(
    Channel& channel, int rank, int size, const RendezvousOptions& options);

}  // namespace ddpx::shm
