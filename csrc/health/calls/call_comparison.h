// Compares the collective calls of ranks in a step, and describes how they differ.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../machine/recent_steps.h"
#include "../verdict/peer_table.h"

namespace ddpx::health {

using CallsByRank = std::map<int, StepCalls>;

enum class Comparison { kSame, kUndecided, kDifferent };

// Compares the calls of the ranks of this machine in a step. Different launches are kDifferent at
// once. Different results are kUndecided until every rank has published results, and kSame if a
// rank marked its results as spoiled. `is_over`: this rank has ended the next step, so every rank
// has ended this step. Called in every step, so copies no peers.
Comparison compare(const PeerTable& peers, const StepCalls& ours, bool is_over);

// The calls of this rank, and of the ranks whose pages this rank can read.
CallsByRank calls_by_rank(const PeerTable& peers, const StepCalls& ours);

// The numbers of calls to the group, if they differ.
std::optional<std::string> uneven_sequences(const CallsByRank& ranks);

// Describes how the calls of ranks differ, in the step of the first calls.
std::string describe_mismatch(const CallsByRank& ranks);

// The failure of ranks whose calls differ, or that froze different params. `frozen_by`: the result
// of FrozenParams::encode_all() of a rank. `names`: of the params of the wrapper.
Failure mismatch_of(
    const CallsByRank& ranks,
    const std::function<std::string(int rank)>& frozen_by,
    const std::vector<std::string>& names);

}  // namespace ddpx::health
