// The other ranks of a group: who has been met, who is gone, who is late.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bucket_names.h"
#include "failure.h"
#include "peer.h"
#include "rank_names.h"

namespace ddpx::health {

enum class Comparison { kSame, kUndecided, kDifferent };

// Thread-safe; nothing in here waits.
class Roster {
 public:
  // `same_sequence`: ranks whose collective calls are the same have the same Trail::sequence.
  Roster(int rank, int world_size, bool same_sequence);

  // False if the introduction is of no use: see Peer::meet.
  bool meet(int rank, const Introduction& introduction, const ProcessId& self);

  // By rank; null for this rank, and for those that have not introduced themselves.
  std::vector<std::shared_ptr<Peer>> peers() const;
  std::shared_ptr<Peer> peer(int rank) const;
  std::vector<int> far_ranks() const;  // on other machines
  std::size_t num_pages() const;       // that are open

  // Of the lowest rank of a machine: that of the next one, with whose calls it compares its own, so
  // that together they go around. None for other ranks, and before all have been met.
  std::optional<int> counterpart() const;

  void name_ranks(RankNames names);
  RankNames rank_names() const;

  BucketNames& names() {
    return names_;
  }
  const BucketNames& names() const {
    return names_;
  }

  // Ranks that are dead, or whose script is ending with an error. Of ranks that fail because of
  // others nothing, unless nobody else is to blame. Those that have just left only if asked for.
  std::optional<Failure> find_dead(bool also_left) const;

  // What another rank of this machine has declared, for all: the first one.
  std::optional<Failure> find_declared() const;

  // Whose words count, of the ranks of this machine that have proposed to declare something: those
  // of the first to come here, for all. `own`: this rank's page.
  int elect(const PageView& own) const;
  // What another rank has proposed, or declared since; none while it is being written.
  std::optional<Failure> proposal_of(int rank) const;

  // Ranks of other machines that have told nothing for a while, although this one has asked since
  // `asked_ns`. Of use if the store answers.
  std::optional<Failure> find_silent(int64_t asked_ns) const;

  // Ranks that have not introduced themselves, and so have not got as far as wrapping a model.
  // `store_answers`: the store could be asked for them to the end.
  std::optional<Failure> find_unknown(bool store_answers) const;

  // Those that have not made the calls that a rank at `activity` and `progress` waits for.
  std::vector<int> missing(const Activity& activity, const Progress& progress) const;
  std::string describe_missing(int rank) const;
  // "last seen in step 3, phase forward, for 12 s".
  std::string whereabouts(const Peer& peer) const;

  // Whether ranks of this machine made the same calls in a step. By results alone that is undecided
  // until all are through with it, and none has said that its results are spoiled. `is_over`: they
  // are through, since this one has come to the end of the next step.
  Comparison compare(const Trail& ours, bool is_over) const;
  std::string describe_calls(const Trail& ours) const;

  // Numbers of calls made to the group, by rank, if they differ where that may be meant.
  std::optional<std::string> uneven_sequences(const Trail& ours) const;

 private:
  Casualty casualty(const Peer& peer, std::string what) const;

  // Whether all whose calls are known made the same. In every step: nothing is copied.
  bool agrees(const Trail& ours) const;
  std::vector<std::pair<int, Trail>> trails(const Trail& ours) const;  // by rank

  int rank_;
  bool same_sequence_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Peer>> peers_;
  RankNames rank_names_;
  BucketNames names_;
};

}  // namespace ddpx::health
