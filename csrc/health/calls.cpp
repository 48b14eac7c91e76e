#include "calls.h"

#include <algorithm>
#include <sstream>

namespace ddpx::health {

Comparison compare(const PeerTable& peers, const StepCalls& ours, bool is_over) {
  bool is_same = true;
  bool all_are_through = true;
  bool any_spoiled = ours.results == StepCalls::kSpoiled;
  const auto with_page = peers.with_page();
  for (const auto& peer : *with_page) {
    const auto theirs = peer->page()->calls.find(ours);
    if (!theirs) {
      all_are_through = false;
      continue;
    }
    if (!ours.same_launches(*theirs)) {
      return Comparison::kDifferent;
    }
    is_same = is_same && ours.same_results(*theirs);
    all_are_through = all_are_through && (is_over || theirs->results != 0);
    any_spoiled = any_spoiled || theirs->results == StepCalls::kSpoiled;
  }
  return is_same || any_spoiled                     ? Comparison::kSame
         : all_are_through && peers.all_are_known() ? Comparison::kDifferent
                                                    : Comparison::kUndecided;
}

CallsByRank calls_by_rank(const PeerTable& peers, const StepCalls& ours) {
  CallsByRank known{{peers.rank(), ours}};
  const auto with_page = peers.with_page();
  for (const auto& peer : *with_page) {
    if (const auto theirs = peer->page()->calls.find(ours)) {
      known.emplace_back(peer->rank(), *theirs);
    }
  }
  std::sort(known.begin(), known.end(), [](auto& a, auto& b) { return a.first < b.first; });
  return known;
}

std::optional<std::string> uneven_sequences(const CallsByRank& ranks) {
  bool is_even = true;
  std::ostringstream out;
  for (const auto& [rank, calls] : ranks) {
    is_even = is_even && calls.sequence == ranks.front().second.sequence;
    out << (out.tellp() > 0 ? ", " : "") << "rank " << rank << ": " << calls.sequence;
  }
  return is_even ? std::nullopt : std::make_optional(out.str());
}

namespace {

std::string buckets_of(const StepCalls& calls) {
  return std::to_string(calls.num_launched) + (calls.num_launched == 1 ? " bucket" : " buckets") +
         " of " + std::to_string(calls.num_bytes) + " bytes in all";
}

bool differ(const StepCalls& a, const StepCalls& b) {
  return a.sequence != b.sequence || !a.same_launches(b) || !a.same_results(b);
}

// "rank 1 made one more collective call than rank 0, 7 against 6, by step 3". Compares a rank of
// the majority with one of the minority.
std::string difference_in_words(const CallsByRank& ranks) {
  const auto num_like = [&ranks](const auto& one) {
    return std::count_if(ranks.begin(), ranks.end(), [&one](const auto& each) {
      return !differ(each.second, one.second);
    });
  };
  const auto usual = std::max_element(
      ranks.begin(), ranks.end(), [&](auto& a, auto& b) { return num_like(a) < num_like(b); });
  const auto other = std::find_if(ranks.begin(), ranks.end(), [&usual](const auto& each) {
    return differ(each.second, usual->second);
  });
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
  const auto& ours = ranks.front().second;
  const int model = model_of(ours.wrapper);
  std::ostringstream out;
  out << difference_in_words(ranks) << ": ranks made different collective calls in step "
      << ours.step;
  if (model > 0 && model < kNumModels) {
    out << " of wrapper " << model;
  }
  out << ", or before it.";
  for (const auto& [rank, calls] : ranks) {
    out << "\n  rank " << rank << ": " << buckets_of(calls);
    if (calls.sequence != 0) {
      out << ", the first as call number " << calls.sequence << " of the group";
    }
  }
  out << "\n  Digests of sizes and results:" << std::hex;
  for (const auto& [rank, calls] : ranks) {
    out << (rank == ranks.front().first ? " " : "; ") << "rank " << std::dec << rank << std::hex
        << " " << (calls.digest >> 32);
    if (calls.has_results()) {
      out << ", " << (calls.results >> 32);
    }
  }
  return out.str();
}

}  // namespace ddpx::health
