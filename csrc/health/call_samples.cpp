#include "call_samples.h"

#include <sstream>
#include <tuple>
#include <vector>

#include "calls.h"

namespace ddpx::health {
namespace {

void write(std::ostream& out, const CallSample& sample) {
  const auto& trail = sample.trail;
  out << std::hex << sample.wrapper << ' ' << trail.step << ' ' << trail.num_launched << ' '
      << trail.digest << ' ' << trail.sequence << ' ' << trail.results << ' ' << trail.num_bytes
      << '\n';
}

bool read(std::istream& in, CallSample& sample) {
  auto& trail = sample.trail;
  in >> std::hex >> sample.wrapper >> trail.step >> trail.num_launched >> trail.digest >>
      trail.sequence >> trail.results >> trail.num_bytes;
  trail.model = model_of(sample.wrapper);
  return static_cast<bool>(in);
}

auto key(const CallSample& sample) {
  return std::tuple(sample.trail.step, sample.wrapper);
}

}  // namespace

void CallSamples::add(const CallSample& sample) {
  std::size_t level = 0;
  // Wrappers that take turns come to a level in different steps, evenly (0.618 of 256 apart).
  for (auto step = sample.trail.step + 157 * sample.wrapper;
       level + 1 < kNumLevels && step % kFactor == 0;
       ++level) {
    step /= kFactor;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& kept = levels_[level];
  if (kept.size() == kNumKept) {
    kept.pop_front();
  }
  kept.push_back(sample);
}

std::string CallSamples::to_text() const {
  std::ostringstream out;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& sample : kept) {
      write(out, sample);
    }
  }
  return out.str();
}

std::optional<std::pair<Trail, Trail>> CallSamples::find_mismatch(
    const std::string& theirs, bool same_sequence) const {
  std::istringstream in(theirs);
  std::vector<CallSample> told;
  for (CallSample sample; read(in, sample);) {
    told.push_back(sample);
  }
  std::optional<CallSample> first;
  std::optional<std::pair<Trail, Trail>> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : levels_) {
    for (const auto& own : kept) {
      for (const auto& other : told) {
        if (key(own) == key(other) && !same_calls(own.trail, other.trail, same_sequence) &&
            (!first || key(own) < key(*first))) {
          first = own;
          found = {own.trail, other.trail};
        }
      }
    }
  }
  return found;
}

}  // namespace ddpx::health
