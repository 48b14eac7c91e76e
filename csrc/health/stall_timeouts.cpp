#include "stall_timeouts.h"

#include <utility>

namespace ddpx::health {

StallTimeouts& StallTimeouts::instance() {
  static StallTimeouts instance;
  return instance;
}

StallTimer::Due StallTimer::look(
    int64_t since_ns, int64_t waited_ns, const StallTimeouts& timeouts) {
  if (since_ns != since_ns_) {
    const bool warned = std::exchange(num_warnings_, 0) > 0;
    since_ns_ = since_ns;
    if (warned) {
      return Due::kOver;
    }
  }
  if (since_ns == 0) {
    return Due::kNothing;
  }
  last_wait_ns_ = waited_ns;
  return waited_ns >= timeouts.raise_ns ? Due::kGiveUp : look_on(waited_ns, timeouts);
}

StallTimer::Due StallTimer::look_on(int64_t waited_ns, const StallTimeouts& timeouts) {
  if (waited_ns < (num_warnings_ == 0 ? timeouts.warn_ns.load() : next_warning_ns_)) {
    return Due::kNothing;
  }
  next_warning_ns_ = 2 * waited_ns;
  ++num_warnings_;
  return Due::kWarning;
}

}  // namespace ddpx::health
