#include "stacks.h"

#include <algorithm>
#include <thread>

namespace ddpx::health {
namespace {

using std::chrono::milliseconds;

constexpr auto kStackPoll = milliseconds(10);

}  // namespace

std::optional<std::string> request_stack(const std::shared_ptr<Peer>& peer, milliseconds timeout) {
  if (!peer || !peer->page()) {
    return std::nullopt;
  }
  auto& page = *peer->page();
  const auto before = page.stack.num_writes();
  page.num_stack_requests.fetch_add(1);
  // Bounded, because a clock's nanoseconds overflow.
  const auto limit = std::clamp<milliseconds>(timeout, milliseconds(0), std::chrono::hours(24));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (page.stack.num_writes() == before) {
    if (std::chrono::steady_clock::now() >= deadline || peer->ended()) {
      return std::nullopt;
    }
    std::this_thread::sleep_for(kStackPoll);
  }
  return page.stack.read();
}

}  // namespace ddpx::health
