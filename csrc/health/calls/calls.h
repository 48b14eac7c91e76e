// Compares the collective calls that ranks made in a step, and describes how they differ.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../machine/peer_table.h"
#include "recent_steps.h"

namespace ddpx::health {

using CallsByRank = std::vector<std::pair<int, StepCalls>>;

enum class Comparison { kSame, kUndecided, kDifferent };

// Whether ranks of this machine made the same calls in a step. By results alone that is undecided
// until all are through with it, and none has said that its results are spoiled. `is_over`: they
// are through, since this one has come to the end of the next step. Called in every step: copies no
// peers.
Comparison compare(const PeerTable& peers, const StepCalls& ours, bool is_over);

// The calls of this rank, and of the ranks with a page, by rank.
CallsByRank calls_by_rank(const PeerTable& peers, const StepCalls& ours);

// The numbers of calls made to the group, if they differ.
std::optional<std::string> uneven_sequences(const CallsByRank& ranks);

// Describes how the calls of ranks differ, in the step of the first calls.
std::string describe_mismatch(const CallsByRank& ranks);

// The failure of ranks whose calls differ, or that froze different params. `frozen_by`: the result
// of FrozenParams::to_text() of a rank. `names`: of the params of the wrapper.
Failure mismatch_of(
    const CallsByRank& ranks,
    const std::function<std::string(int rank)>& frozen_by,
    const std::vector<std::string>& names);

}  // namespace ddpx::health
