#include "frozen_params.h"

#include <algorithm>
#include <sstream>

#include "../machine/fields.h"

namespace ddpx::health {
namespace {

// "0-7 12".
std::string to_ranges(const ParamIndices& params) {
  std::ostringstream out;
  for (std::size_t first = 0; first < params.size();) {
    auto last = first;
    while (last + 1 < params.size() && params[last + 1] == params[last] + 1) {
      ++last;
    }
    out << (first == 0 ? "" : " ") << params[first];
    if (last > first) {
      out << '-' << params[last];
    }
    first = last + 1;
  }
  return out.str();
}

ParamIndices from_ranges(const std::string& text) {
  constexpr std::size_t kMostParams = 1 << 20;  // a bound for malformed texts
  ParamIndices params;
  std::istringstream in(text);
  for (std::string range; in >> range;) {
    const auto dash = range.find('-');
    const auto first = to_number<std::size_t>(range.substr(0, dash));
    const auto last =
        dash == std::string::npos ? first : to_number<std::size_t>(range.substr(dash + 1));
    if (!first || !last || *last > kMostParams) {
      break;
    }
    for (auto param = *first; param <= *last; ++param) {
      params.push_back(param);
    }
  }
  return params;
}

}  // namespace

uint64_t digest_of(const ParamIndices& params) {
  uint64_t digest = 0x9e3779b97f4a7c15;
  for (const auto param : params) {
    digest = (digest ^ (param + 1)) * 0xff51afd7ed558ccd;
    digest ^= digest >> 32;
  }
  return std::max<uint64_t>(digest, 1);
}

void FrozenParams::publish(uint32_t wrapper, uint64_t digest, const ParamIndices& params) {
  auto& text = texts_[wrapper % texts_.size()];
  auto fields = join_fields({std::to_string(wrapper), std::to_string(digest), to_ranges(params)});
  text.write(fields.size() <= text.kMostBytes ? fields : std::string());
}

std::string FrozenParams::to_text() const {
  std::string all;
  for (const auto& text : texts_) {
    all += text.read();
  }
  return all;
}

std::optional<ParamIndices> FrozenParams::find(
    const std::string& text, uint32_t wrapper, uint64_t digest) {
  if (digest == digest_of({})) {
    return ParamIndices();
  }
  const auto fields = split_fields(text);
  for (std::size_t at = 0; at + 3 <= fields.size(); at += 3) {
    if (fields[at] == std::to_string(wrapper) && fields[at + 1] == std::to_string(digest)) {
      return from_ranges(fields[at + 2]);
    }
  }
  return std::nullopt;
}

}  // namespace ddpx::health
