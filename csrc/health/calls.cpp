#include "calls.h"

#include <sstream>
#include <tuple>

namespace ddpx::health {
namespace {

void write(std::ostream& out, const Trail& trail) {
  out << std::hex << trail.wrapper << ' ' << trail.step << ' ' << trail.num_launched << ' '
      << trail.digest << ' ' << trail.sequence << ' ' << trail.results << ' ' << trail.num_bytes
      << '\n';
}

bool read(std::istream& in, Trail& trail) {
  in >> std::hex >> trail.wrapper >> trail.step >> trail.num_launched >> trail.digest >>
      trail.sequence >> trail.results >> trail.num_bytes;
  trail.model = model_of(trail.wrapper);
  return static_cast<bool>(in);
}

auto key(const Trail& trail) {
  return std::tuple(trail.step, trail.wrapper);
}

}  // namespace

bool same_calls(const Trail& a, const Trail& b, bool same_sequence) {
  const bool same_stage = a.num_launched == b.num_launched;
  const bool both_are_back = a.has_results() && b.has_results();
  return (!same_stage || !same_sequence || a.sequence == b.sequence) &&
         (!same_stage || a.digest == b.digest) && (!both_are_back || a.results == b.results);
}

std::string describe_mismatch(const std::vector<std::pair<int, Trail>>& ranks) {
  const auto& ours = ranks.front().second;
  std::ostringstream out;
  out << "ranks made different collective calls in step " << ours.step;
  if (ours.model > 0 && ours.model < kNumConstructed) {
    out << " of wrapper " << int{ours.model};
  }
  out << ", or before it:";
  for (const auto& [rank, trail] : ranks) {
    out << "\n  rank " << rank << ": " << trail.num_launched
        << (trail.num_launched == 1 ? " bucket" : " buckets") << " of " << trail.num_bytes
        << " bytes in all" << std::hex << " (digest of the sizes " << (trail.digest >> 32);
    if (trail.has_results()) {
      out << ", of what came back " << (trail.results >> 32);
    }
    out << std::dec << ")";
    if (trail.sequence != 0) {
      out << ", the first as call number " << trail.sequence << " of the group";
    }
  }
  return out.str();
}

void CallSamples::add(const Trail& trail) {
  std::size_t level = 0;
  // Wrappers that take turns come to a level in different steps: 157 is 0.61 of 256.
  for (auto step = trail.step + 157 * trail.wrapper; level + 1 < kNumLevels && step % kFactor == 0;
       ++level) {
    step /= kFactor;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& kept = levels_[level];
  if (kept.size() == kNumKept) {
    kept.pop_front();
  }
  kept.push_back(trail);
}

std::string CallSamples::to_text() const {
  std::ostringstream out;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& trail : kept) {
      write(out, trail);
    }
  }
  return out.str();
}

std::optional<std::pair<Trail, Trail>> CallSamples::find_mismatch(
    const std::string& theirs, bool same_sequence) const {
  std::istringstream in(theirs);
  std::vector<Trail> known;
  for (Trail trail; read(in, trail);) {
    known.push_back(trail);
  }
  std::optional<std::pair<Trail, Trail>> found;
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
