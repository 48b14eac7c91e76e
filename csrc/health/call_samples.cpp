#include "call_samples.h"

#include <sstream>
#include <tuple>
#include <vector>

#include "calls.h"

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

void CallSamples::add(const Trail& trail) {
  std::size_t level = 0;
  // Wrappers that take turns come to a level in different steps, evenly (0.618 of 256 apart).
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
  std::vector<Trail> told;
  for (Trail trail; read(in, trail);) {
    told.push_back(trail);
  }
  std::optional<std::pair<Trail, Trail>> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& own : kept) {
      for (const auto& other : told) {
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
