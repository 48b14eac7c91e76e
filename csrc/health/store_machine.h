// The ranks on the machine of the store, when the store does not answer.
#pragma once

#include "host_table.h"
#include "store.h"

namespace ddpx::health {

// Ranks of other hosts hear only through the store whether these ranks live. Without it, they ask
// the kernel of the machine: each of these ranks listens at a port. A rank of another host counts
// as lost with the store only if its port was open at the start.
class StoreMachine {
 public:
  StoreMachine(StoreAccess access, int world_size)
      : access_(std::move(access)), size_(world_size) {}

  // Finds out which ports of ranks of other hosts are open. All ranks must be known.
  void meet(HostTable& table) const;

  // Marks all these ports as open again, since the store answers.
  void mark_well(HostTable* table) const;

  // For a store that does not answer. Marks the ranks that are lost with it. Returns whether its
  // process has ended. Waits for four seconds at most, and a second for each of the ranks.
  bool look(HostTable* table) const;

 private:
  const StoreAccess access_;
  const int size_;
};

}  // namespace ddpx::health
