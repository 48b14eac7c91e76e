#include "calls.h"

#include <algorithm>
#include <sstream>
#include <tuple>

namespace ddpx::health {
namespace {

void write(std::ostream& out, const StepCalls& calls) {
  out << std::hex << calls.wrapper << ' ' << calls.step << ' ' << calls.num_launched << ' '
      << calls.digest << ' ' << calls.sequence << ' ' << calls.results << ' ' << calls.num_bytes
      << '\n';
}

bool read(std::istream& in, StepCalls& calls) {
  in >> std::hex >> calls.wrapper >> calls.step >> calls.num_launched >> calls.digest >>
      calls.sequence >> calls.results >> calls.num_bytes;
  calls.model = model_of(calls.wrapper);
  return static_cast<bool>(in);
}

auto key(const StepCalls& calls) {
  return std::tuple(calls.step, calls.wrapper);
}

}  // namespace

bool same_calls(const StepCalls& a, const StepCalls& b, bool same_sequence) {
  const bool same_stage = a.num_launched == b.num_launched;
  const bool both_are_back = a.has_results() && b.has_results();
  return (!same_stage || !same_sequence || a.sequence == b.sequence) &&
         (!same_stage || a.digest == b.digest) && (!both_are_back || a.results == b.results);
}

namespace {

std::string buckets_of(const StepCalls& calls) {
  return std::to_string(calls.num_launched) + (calls.num_launched == 1 ? " bucket" : " buckets") +
         " of " + std::to_string(calls.num_bytes) + " bytes in all";
}

bool differ(const StepCalls& a, const StepCalls& b) {
  return a.sequence != b.sequence || !same_calls(a, b, /*same_sequence=*/true);
}

// "rank 1 made one more collective call than rank 0, 7 against 6, by step 3". Compares a rank of
// the majority with one of the minority.
std::string difference_in_words(const std::vector<std::pair<int, StepCalls>>& ranks) {
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

std::string describe_mismatch(const std::vector<std::pair<int, StepCalls>>& ranks) {
  const auto& ours = ranks.front().second;
  std::ostringstream out;
  out << difference_in_words(ranks) << ": ranks made different collective calls in step "
      << ours.step;
  if (ours.model > 0 && ours.model < kNumConstructed) {
    out << " of wrapper " << int{ours.model};
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

void CallSamples::add(const StepCalls& calls) {
  std::size_t level = 0;
  // Wrappers that take turns come to a level in different steps: 157 is 0.61 of 256.
  for (auto step = calls.step + 157 * calls.wrapper; level + 1 < kNumLevels && step % kFactor == 0;
       ++level) {
    step /= kFactor;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& kept = levels_[level];
  if (kept.size() == kNumKept) {
    kept.pop_front();
  }
  kept.push_back(calls);
}

std::string CallSamples::to_text() const {
  std::ostringstream out;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& calls : kept) {
      write(out, calls);
    }
  }
  return out.str();
}

std::optional<std::pair<StepCalls, StepCalls>> CallSamples::find_mismatch(
    const std::string& theirs, bool same_sequence) const {
  std::istringstream in(theirs);
  std::vector<StepCalls> known;
  for (StepCalls calls; read(in, calls);) {
    known.push_back(calls);
  }
  std::optional<std::pair<StepCalls, StepCalls>> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& own : kept) {
      for (const auto& other : known) {
        if (key(own) == key(other) && !same_calls(own, other, same_sequence) &&
            (!found || key(own) < key(found->first))) {
          found = {own, other};
        }
      }
    }
  }
  return found;
}

}  // namespace ddpx::health
