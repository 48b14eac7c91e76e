// Memory that all ranks of one host share, on the status page of one of these ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "../../os/first_record.h"
#include "activity.h"
#include "introduction.h"
#include "shared_text.h"

namespace ddpx::health {

// Zeroed at first. Any thread of any rank of the host may use all members.
struct HostTable {
  enum class Stage : uint32_t {
    kGathering = 0,  // some ranks of the group are not known yet
    kOneHost = 1,    // all ranks of the group are on this host
    kManyHosts = 2,
  };

  // The state of one rank. A rank of this host writes its own entry. The host's keeper writes the
  // entries of ranks of other hosts.
  struct Rank {
    std::atomic<uint64_t> host;       // the token of its host; 0: the rank is not known
    SharedActivity activity;          // `since_ns`, by the clock of this host
    std::atomic<uint64_t> num_calls;  // see StatusPage
    std::atomic<int64_t> heard_ns;    // when its host last wrote; 0 for ranks of this host
    std::atomic<bool> has_left;       // its script, or its group, has ended without an error
    SharedText<Introduction::kMostBytes> introduction;
  };

  // The token of the host of the page's owner; 0 until it is decided. The token of a host is the
  // token of the page whose table the host uses.
  std::atomic<uint64_t> host;

  // The failure that a rank of the host declared first. All ranks of the host report it.
  struct DeclaredFailure {
    uint32_t num_bytes;
    std::array<char, 16384> bytes;  // of Failure::encode(), cut off
  };
  os::FirstRecord<DeclaredFailure> failure;
  std::atomic<bool> failure_posted;  // the store has this failure, or an earlier one

  std::atomic<Stage> stage;
  std::atomic<int32_t> keeper_plus_1;
  std::atomic<int64_t> renewed_ns;        // the start of the last successful renewal of the lease
  std::atomic<int64_t> wanted_until_ns;   // until then, a rank needs new states of other hosts
  std::atomic<int64_t> read_ns;           // when the keeper last read the states of all other hosts
  std::atomic<int64_t> between_reads_ns;  // the period of these reads while a rank needs states
  std::atomic<uint32_t> store_state;      // StoreState, as the keeper sees it
  std::atomic<int64_t> store_state_ns;    // when the keeper wrote `store_state`
  std::atomic<uint32_t> next_event;       // see HostChannel::post
  std::atomic<bool> store_may_end;  // the rank that serves the store has left without an error
  Rank ranks[1];                    // of the whole group; see num_bytes

  static std::size_t num_bytes(int world_size) {
    return sizeof(HostTable) + sizeof(Rank) * static_cast<std::size_t>(world_size - 1);
  }

  Rank& rank(int number) {
    return ranks[number];
  }
  const Rank& rank(int number) const {
    return ranks[number];
  }

  // Decides the host of the page's owner, unless it is decided. Returns the decision.
  uint64_t decide_host(uint64_t token);

  // Adds a rank that has become known.
  void introduce(const Introduction& who, uint64_t host_of_rank);

  bool is_member(int number) const {
    return rank(number).host == host;
  }

  // Declares a failure, unless another rank of the host has declared a failure. Returns the first
  // failure. Waits as FirstRecord does.
  std::string declare(const std::string& record);

  // The first failure.
  std::optional<std::string> declared() const;
};

}  // namespace ddpx::health
