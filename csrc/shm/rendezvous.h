// How ranks meet: each finds out by trying with whom it can share memory, and all agree on it.
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

struct MeetingOptions {
  HomeSizes sizes;
  std::chrono::milliseconds timeout;
  // For tests: ranks with different identities do not try to reach each other.
  std::string host_identity;
};

// A rank on the same host, as this rank holds it.
struct Neighbour {
  std::shared_ptr<HomeSegment> home;
  std::shared_ptr<Connection> connection;  // none to oneself
};

struct Meeting {
  Topology topology;
  std::vector<Neighbour> neighbours;  // by local rank, oneself among them
};

// Collective over all ranks of the group. Throws kTimeout naming the rank that did not come,
// kOutOfMemory if there is no room for this rank's staging buffers.
Meeting meet(Channel& channel, int rank, int size, const MeetingOptions& options);

}  // namespace ddpx::shm
