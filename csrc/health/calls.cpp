#include "calls.h"

#include <algorithm>
#include <bit>
#include <sstream>

#include "activity.h"
#include "peer_table.h"

namespace ddpx::health {
namespace {

using Words = std::array<uint64_t, sizeof(StepCalls) / sizeof(uint64_t)>;

bool is_reduced(const StepCalls& calls) {
  return calls.results != 0 && calls.results != StepCalls::kSpoiled;
}

void write(std::ostream& out, const StepCalls& calls) {
  out << std::hex << calls.wrapper << ' ' << calls.step << ' ' << calls.num_launched << ' '
      << calls.digest << ' ' << calls.sequence << ' ' << calls.results << ' ' << calls.num_bytes
      << '\n';
}

bool read(std::istream& in, StepCalls& calls) {
  in >> std::hex >> calls.wrapper >> calls.step >> calls.num_launched >> calls.digest >>
      calls.sequence >> calls.results >> calls.num_bytes;
  return static_cast<bool>(in);
}

}  // namespace

// ---- recent steps -------------------------------------------------------------------------------

// Wrappers that take turns have different places, and come to a level in different steps: 157 is
// 0.61 of 256.
std::size_t RecentSteps::place_of(uint8_t model, uint32_t step) {
  std::size_t turn = std::size_t{step} + std::size_t{157} * model;
  std::size_t level = 0;
  for (; level + 1 < kNumLevels && turn % kFactor == 0; ++level) {
    turn /= kFactor;
  }
  return level * kFactor + turn % kFactor;
}

void RecentSteps::publish(const StepCalls& calls) {
  auto& entry = entries_[place_of(model_of(calls.wrapper), calls.step)];
  const auto words = std::bit_cast<Words>(calls);
  const auto version = entry.version.load(std::memory_order_relaxed);
  entry.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < words.size(); ++i) {
    entry.words[i].store(words[i], std::memory_order_relaxed);
  }
  entry.version.store(version + 2, std::memory_order_release);
}

std::optional<StepCalls> RecentSteps::Entry::read() const {
  const auto before = version.load(std::memory_order_acquire);
  Words copy{};
  for (std::size_t i = 0; i < copy.size(); ++i) {
    copy[i] = words[i].load(std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  const bool is_whole = before % 2 == 0 && version.load(std::memory_order_relaxed) == before;
  return is_whole ? std::make_optional(std::bit_cast<StepCalls>(copy)) : std::nullopt;
}

std::optional<StepCalls> RecentSteps::find(uint8_t model, uint32_t step) const {
  const auto found = entries_[place_of(model, step)].read();
  const bool is_this = found && found->step == step && model_of(found->wrapper) == model;
  return is_this && found->num_launched > 0 ? found : std::nullopt;
}

std::optional<StepCalls> RecentSteps::find(const StepCalls& other) const {
  const auto found = find(model_of(other.wrapper), other.step);
  return found && found->wrapper == other.wrapper ? found : std::nullopt;
}

std::string RecentSteps::to_text() const {
  std::ostringstream out;
  for (const auto& entry : entries_) {
    const auto calls = entry.read();
    if (calls && is_reduced(*calls)) {
      write(out, *calls);
    }
  }
  return out.str();
}

std::optional<std::pair<StepCalls, StepCalls>> RecentSteps::find_mismatch(
    const std::string& theirs) const {
  std::istringstream in(theirs);
  std::optional<std::pair<StepCalls, StepCalls>> found;
  for (StepCalls other; read(in, other);) {
    const auto own = find(other);
    const bool differs =
        own && is_reduced(*own) && !(own->same_launches(other) && own->same_results(other));
    if (differs && (!found || own->step < found->first.step)) {
      found = {*own, other};
    }
  }
  return found;
}

// ---- comparison ---------------------------------------------------------------------------------

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
