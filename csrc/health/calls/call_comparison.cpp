#include "call_comparison.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "../../count.h"

namespace ddpx::health {

Comparison compare(const PeerTable& peers, const StepCalls& ours, bool is_over) {
  bool is_same = true;
  bool all_have_ended = true;
  bool any_spoiled = ours.results == StepCalls::kSpoiled;
  const auto with_page = peers.with_page();
  for (const auto& peer : *with_page) {
    const auto theirs = peer->page()->calls.find(ours);
    if (!theirs) {
      all_have_ended = false;
      continue;
    }
    if (!ours.same_launches(*theirs) || !ours.same_frozen(*theirs)) {
      return Comparison::kDifferent;
    }
    is_same = is_same && ours.same_results(*theirs);
    all_have_ended = all_have_ended && (is_over || theirs->results != 0);
    any_spoiled = any_spoiled || theirs->results == StepCalls::kSpoiled;
  }
  return is_same || any_spoiled                    ? Comparison::kSame
         : all_have_ended && peers.all_are_known() ? Comparison::kDifferent
                                                   : Comparison::kUndecided;
}

CallsByRank calls_by_rank(const PeerTable& peers, const StepCalls& ours) {
  CallsByRank known{{peers.rank(), ours}};
  const auto with_page = peers.with_page();
  for (const auto& peer : *with_page) {
    if (const auto theirs = peer->page()->calls.find(ours)) {
      known.emplace(peer->rank(), *theirs);
    }
  }
  return known;
}

std::optional<std::string> uneven_sequences(const CallsByRank& ranks) {
  bool is_even = true;
  std::ostringstream out;
  for (const auto& [rank, calls] : ranks) {
    is_even = is_even && calls.sequence == ranks.begin()->second.sequence;
    out << (out.tellp() > 0 ? ", " : "") << "rank " << rank << ": " << calls.sequence;
  }
  return is_even ? std::nullopt : std::make_optional(out.str());
}

namespace {

std::string buckets_of(const StepCalls& calls) {
  return count(calls.num_launched, "bucket") + " of " + std::to_string(calls.num_bytes) +
         " bytes in all";
}

bool differ(const StepCalls& a, const StepCalls& b) {
  return a.sequence != b.sequence || !a.same_launches(b) || !a.same_results(b);
}

// A rank of the majority, and a rank of the minority, or the end of `ranks` if there is no
// minority.
template <typename Differ>
auto find_odd_one(const CallsByRank& ranks, const Differ& differ) {
  const auto num_like = [&](const auto& one) {
    return std::count_if(ranks.begin(), ranks.end(), [&](const auto& each) {
      return !differ(each.second, one.second);
    });
  };
  const auto usual = std::max_element(
      ranks.begin(), ranks.end(), [&](auto& a, auto& b) { return num_like(a) < num_like(b); });
  const auto other = std::find_if(ranks.begin(), ranks.end(), [&](const auto& each) {
    return differ(each.second, usual->second);
  });
  return std::pair(usual, other);
}

// "rank 1 made one more collective call than rank 0, 7 against 6, by step 3". Compares a rank of
// the majority with a rank of the minority.
std::string difference_in_words(const CallsByRank& ranks) {
  const auto [usual, other] = find_odd_one(ranks, differ);
  if (other == ranks.end()) {
    return "ranks differ";
  }
  const auto& [rank, calls] = *other;
  const auto& expected = usual->second;
  const auto step = std::to_string(calls.step);
  const auto than = " than rank " + std::to_string(usual->first);
  std::ostringstream out;
  out << "rank " << rank;
  if (calls.sequence != expected.sequence) {
    const bool more = calls.sequence > expected.sequence;
    const auto by = more ? calls.sequence - expected.sequence : expected.sequence - calls.sequence;
    out << " made " << (by == 1 ? "one" : std::to_string(by)) << (more ? " more" : " fewer")
        << " collective call" << (by == 1 ? "" : "s") << than << ", " << calls.sequence
        << " against " << expected.sequence << ", by step " << step;
  } else if (calls.digest != expected.digest) {
    out << " reduced other buckets" << than << " in step " << step << ", " << buckets_of(calls)
        << " against " << buckets_of(expected);
  } else {
    out << " received other sums" << than << " in step " << step;
  }
  return out.str();
}

}  // namespace

std::string describe_mismatch(const CallsByRank& ranks) {
  const auto& ours = ranks.begin()->second;
  std::ostringstream out;
  out << difference_in_words(ranks) << ": ranks made different collective calls in step "
      << ours.step << of_wrapper(model_of(ours.wrapper)) << ", or before it.";
  for (const auto& [rank, calls] : ranks) {
    out << "\n  rank " << rank << ": " << buckets_of(calls);
    if (calls.sequence != 0) {
      out << ", the first as call number " << calls.sequence << " of the group";
    }
  }
  out << "\n  Digests of sizes and results:" << std::hex;
  for (const auto& [rank, calls] : ranks) {
    out << (rank == ranks.begin()->first ? " " : "; ") << "rank " << std::dec << rank << std::hex
        << " " << (calls.digest >> 32);
    if (calls.has_results()) {
      out << ", " << (calls.results >> 32);
    }
  }
  return out.str();
}

namespace {

// The names of the params in `first` that are not in `second`, quoted; empty if there are none.
std::string names_of_others(
    const ParamIndices& first, const ParamIndices& second, const std::vector<std::string>& names) {
  ParamIndices others;
  std::set_difference(
      first.begin(), first.end(), second.begin(), second.end(), std::back_inserter(others));
  std::vector<std::string> found;
  for (const auto param : others) {
    found.push_back(param < names.size() ? names[param] : "parameter " + std::to_string(param));
  }
  return join_names(found);
}

}  // namespace

Failure mismatch_of(
    const CallsByRank& ranks,
    const std::function<std::string(int rank)>& frozen_by,
    const std::vector<std::string>& names) {
  const bool same_launches = find_odd_one(ranks, [](const auto& a, const auto& b) {
                               return !a.same_launches(b);
                             }).second == ranks.end();
  const auto [usual, other] =
      find_odd_one(ranks, [](const auto& a, const auto& b) { return !a.same_frozen(b); });
  if (!same_launches || other == ranks.end()) {
    return {FailureKind::kMismatch, {}, describe_mismatch(ranks)};
  }
  const auto frozen_on = [&](const auto& rank) {
    const auto& [number, calls] = rank;
    return FrozenParams::find(frozen_by(number), calls.wrapper, calls.frozen);
  };
  std::ostringstream out;
  out << "rank " << other->first << " and rank " << usual->first
      << " froze different parameters in step " << usual->second.step
      << of_wrapper(model_of(usual->second.wrapper));
  const auto theirs = frozen_on(*other);
  const auto ours = frozen_on(*usual);
  if (theirs && ours) {
    const auto only_theirs = names_of_others(*theirs, *ours, names);
    const auto only_ours = names_of_others(*ours, *theirs, names);
    const char* separator = ": ";
    for (const auto& [rank, others] :
         {std::pair(other, only_theirs), std::pair(usual, only_ours)}) {
      if (!others.empty()) {
        out << separator << others << " on rank " << rank->first << " only";
        separator = "; ";
      }
    }
  }
  return {FailureKind::kFrozen, {}, out.str()};
}

}  // namespace ddpx::health
