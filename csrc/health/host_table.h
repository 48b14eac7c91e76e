// Memory that all ranks of one host share. It lies on the status page of the host's first member.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "introduction.h"
#include "shared_text.h"

namespace ddpx::health {

// Zeroed at first. All members are atomics, so any thread of any rank of the host may use them.
struct HostTable {
  enum class Stage : uint32_t {
    kGathering = 0,  // some ranks of the group have not introduced themselves yet
    kOneHost = 1,    // all ranks of the group are on this host
    kManyHosts = 2,
  };
  enum class Place : uint32_t { kUnknown = 0, kThisHost = 1, kOtherHost = 2 };

  // What is known of one rank. A rank of this host writes its own entry. The host's keeper writes
  // the entries of ranks of other hosts.
  struct Rank {
    std::atomic<Place> place;
    std::atomic<uint64_t> activity;  // packed; see Activity
    std::atomic<uint64_t> progress;  // packed; see Progress
    std::atomic<int64_t> since_ns;   // the start of the activity, by the clock of this host
    std::atomic<int64_t> heard_ns;   // another host: when its last message was new
    SharedText<Introduction::kMostBytes> introduction;
  };

  // The first failure that a rank of this host declared. All ranks of the host report this one.
  std::atomic<int32_t> declared_by_plus_1;
  std::atomic<int64_t> declared_ns;  // 0 until `failure` is complete
  SharedText<8192> failure;
  std::atomic<bool> failure_posted;  // all hosts hear of it, or of an earlier one

  std::atomic<Stage> stage;
  std::atomic<int32_t> keeper_plus_1;
  std::atomic<int64_t> renewed_ns;       // the start of the last successful renewal of the lease
  std::atomic<int64_t> wanted_until_ns;  // until then a rank needs fresh states of other hosts
  std::atomic<int64_t> read_ns;          // when the keeper last read the states of all other hosts
  std::atomic<uint32_t> store_state;     // StoreState, as the keeper sees it
  std::atomic<int64_t> store_state_ns;   // when the keeper wrote `store_state`
  std::atomic<uint32_t> next_event;      // see HostChannel::post
  std::atomic<bool> store_may_end;       // rank 0 has left without an error
  Rank ranks[1];                         // of the whole group; see num_bytes

  static std::size_t num_bytes(int world_size) {
    return sizeof(HostTable) + sizeof(Rank) * static_cast<std::size_t>(world_size - 1);
  }

  Rank& rank(int number) {
    return ranks[number];
  }
  const Rank& rank(int number) const {
    return ranks[number];
  }

  void introduce(const Introduction& who, Place place);

  // Declares a failure. Returns the failure that stands: this one, or the one that another rank of
  // the host declared before.
  std::string declare(int rank, const std::string& text, int64_t now_ns);

  // The failure that stands.
  std::optional<std::string> declared() const;
};

}  // namespace ddpx::health
