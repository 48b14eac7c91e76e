#include "peer.h"

#include <fcntl.h>

#include <utility>

#include "../../os/error.h"
#include "../../os/unique_fd.h"

namespace ddpx::health {

std::shared_ptr<StatusPage> open_page(const Introduction& rank, int world_size) {
  const auto path =
      "/proc/" + std::to_string(rank.process.pid) + "/fd/" + std::to_string(rank.page_fd);
  const os::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    return nullptr;
  }
  try {
    auto page = map_page(fd.get(), world_size);
    return page && page->token == rank.token ? page : nullptr;
  } catch (const os::Error&) {
    return nullptr;  // the descriptor is that of another file
  }
}

Peer::Peer(
    Introduction introduction, const os::ProcessId& self, const std::shared_ptr<HostTable>& host)
    : introduction_(std::move(introduction)), entry_(host, &host->rank(introduction_.rank)) {
  if (introduction_.process.machine != self.machine) {
    return;
  }
  page_ = open_page(introduction_, /*world_size=*/1);
  watch_.emplace(introduction_.process);
  if (!page_ && !host->is_member(rank()) && (watch_->ended() || watch_->state() == 0)) {
    watch_.reset();
  }
}

Presence Peer::presence() const {
  if (page_) {
    return page_->presence();
  }
  return entry_->has_left ? Presence::kLeft : Presence::kThere;
}

std::optional<Activity> Peer::activity() const {
  if (page_) {
    return page_->activity();
  }
  return entry_->activity.known();
}

uint64_t Peer::num_calls() const {
  return page_ ? page_->num_calls.load() : entry_->num_calls.load();
}

std::optional<Activity> Peer::device() const {
  return page_ ? page_->device.known() : std::nullopt;
}

int64_t Peer::heard_ns() const {
  return entry_->heard_ns;
}

std::optional<std::string> request_stack(const std::shared_ptr<Peer>& peer, int64_t timeout_ns) {
  if (!peer || !peer->page()) {
    return std::nullopt;
  }
  auto& page = *peer->page();
  const auto before = page.stack.num_writes();
  page.num_stack_requests.fetch_add(1);
  const auto answered = [&] { return page.stack.num_writes() != before; };
  poll_until(
      now_ns() + timeout_ns, times::kFailurePoll, [&] { return answered() || peer->ended(); });
  return answered() ? std::make_optional(page.stack.read()) : std::nullopt;
}

}  // namespace ddpx::health
