#include "calls.h"

#include <sstream>

namespace ddpx::health {

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

}  // namespace ddpx::health
