// Memory that all ranks of one host share. It lies on the status page of one of them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "activity.h"
#include "introduction.h"
#include "shared_text.h"

namespace ddpx::health {

// Zeroed at first. All members are atomics, so any thread of any rank of the host may use them.
struct HostTable {
  enum class Stage : uint32_t {
    kGathering = 0,  // some ranks of the group are not known yet
    kOneHost = 1,    // all ranks of the group are on this host
    kManyHosts = 2,
  };

  // What is known of one rank. A rank of this host writes its own entry. The host's keeper writes
  // the entries of ranks of other hosts.
  struct Rank {
    std::atomic<uint64_t> host;       // its token; 0: the rank is not known
    SharedActivity activity;          // `since_ns`, by the clock of this host
    std::atomic<uint64_t> num_calls;  // see StatusPage
    std::atomic<int64_t> heard_ns;    // when its last message was new; 0 for ranks of this host
    std::atomic<bool> has_left;       // its script, or its group, has ended without an error
    SharedText<Introduction::kMostBytes> introduction;
  };

  // The token of the host of the page's owner; 0 until it is decided. The token of a host is the
  // token of the page whose table the host uses.
  std::atomic<uint64_t> host;

  // A failure that one rank writes. Nobody else writes to the draft, and nobody reads it before it
  // is declared, so a rank that is slow, or dies while it writes, changes nothing.
  struct Draft {
    std::atomic<bool> taken;
    std::atomic<int64_t> written_ns;
    SharedText<16384> failure;
  };
  std::array<Draft, 4> drafts;

  // The draft that a rank declared first. All ranks of the host report its failure. 0: none.
  std::atomic<uint32_t> declared_draft_plus_1;
  std::atomic<bool> failure_posted;  // all hosts hear of it, or of an earlier one

  std::atomic<Stage> stage;
  std::atomic<int32_t> keeper_plus_1;
  std::atomic<int64_t> renewed_ns;        // the start of the last successful renewal of the lease
  std::atomic<int64_t> wanted_until_ns;   // until then a rank needs fresh states of other hosts
  std::atomic<int64_t> read_ns;           // when the keeper last read the states of all other hosts
  std::atomic<int64_t> between_reads_ns;  // how often it reads the states while a rank needs them
  std::atomic<uint32_t> store_state;      // StoreState, as the keeper sees it
  std::atomic<int64_t> store_state_ns;    // when the keeper wrote `store_state`
  std::atomic<uint32_t> next_event;       // see HostChannel::post
  std::atomic<bool> store_may_end;        // the rank that serves it has left without an error
  Rank ranks[1];                          // of the whole group; see num_bytes

  static std::size_t num_bytes(int world_size) {
    return sizeof(HostTable) + sizeof(Rank) * static_cast<std::size_t>(world_size - 1);
  }

  Rank& rank(int number) {
    return ranks[number];
  }
  const Rank& rank(int number) const {
    return ranks[number];
  }

  // Decides the host of the page's owner. Returns the decision that stands: this one, or an earlier
  // one.
  uint64_t decide_host(uint64_t token);

  // Makes a rank known.
  void introduce(const Introduction& who, uint64_t host_of_rank);

  bool is_member(int number) const {
    return rank(number).host == host;
  }

  // Declares a failure. Returns the failure that stands: this one, or the one that another rank of
  // the host declared before. Waits while another rank writes, for half a second at most.
  std::string declare(const std::string& text, int64_t now_ns);

  // The failure that stands, and when it was written.
  std::optional<std::string> declared() const;
  int64_t declared_ns() const;  // 0 if there is none
};

}  // namespace ddpx::health
