// The search for the ranks that this rank waits for.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../group_state.h"

namespace ddpx::health {

// A wait of this rank for other ranks.
struct Wait {
  // The kind of wait, as far as this rank knows.
  enum class Kind {
    kHost,      // the host waits in a call
    kLaunched,  // the device waits, or will wait: a rank has not launched what this rank has
    kDevice,    // the device waits, and other ranks may have done their part already
    kCalls,     // a rank has made fewer calls than this rank: one of these calls may wait
  };

  Activity at;  // the call that waits; `since_ns`: the start of the wait
  Kind kind = Kind::kHost;
  std::vector<int> missing = {};  // see missing_ranks()
  int64_t left_ns = 0;            // when this rank saw the last of all ranks that have left

  // In a group on a device, hosts queue their calls and go on.
  bool on_device() const {
    return kind != Kind::kHost;
  }
  // Whether the missing ranks have not done their part.
  bool is_certain() const {
    return kind == Kind::kHost || kind == Kind::kLaunched;
  }
};

// Finds the wait of this rank. Owned by the monitor. The watchdog's thread calls find().
//
// A host that waits has published an activity that waits_for_peers(). In a group on a device, hosts
// queue their calls and go on, and the device waits for ranks that
//   - have not launched a bucket that this rank has launched in the step (as published), or that
//     its device waits for (DeviceProgress);
//   - have made fewer calls to the group, and whose device has nothing to do;
//   - have launched the same buckets, but whose device has not computed the gradients.
// Such a wait begins when this rank detects it, and again when the other rank makes a call. States
// of ranks of other hosts may be old, so these ranks count only while the device waits.
class WaitSearch {
 public:
  explicit WaitSearch(const GroupState& state)
      : state_(state),
        late_(static_cast<std::size_t>(state.group.world_size)),
        left_ns_(late_.size()) {}

  // nullopt if this rank waits for no other rank.
  std::optional<Wait> find(int64_t now_ns);

 private:
  // Another rank that calls of this rank wait for.
  struct Late {
    int64_t since_ns = 0;  // 0: the rank is not late
    uint64_t num_calls = 0;
    bool is_certain = false;
  };

  std::optional<Wait> on_device(const Activity& own, int64_t now_ns);
  std::vector<int> late_hosts(const Activity& own, int64_t now_ns);
  bool is_late(const Peer& peer, const Activity& own, bool* is_certain) const;
  int64_t last_left_ns(int64_t now_ns);
  std::vector<int> late_devices(const Activity& waiting) const;

  const GroupState& state_;
  std::vector<Late> late_;        // by rank
  std::vector<int64_t> left_ns_;  // by rank, when this rank detected that it left or ended; or 0
};

// The ranks that have not reached the call. For a wait of the host, this function finds them, with
// a system call for each rank.
std::vector<int> missing_ranks(const PeerTable& peers, const Wait& wait);

// Whether the device of `theirs` has not computed the gradients for which the device of `ours`
// waits.
bool is_behind_on_device(const std::optional<Activity>& theirs, const Activity& ours);

}  // namespace ddpx::health
