#include "peer.h"

#include <fcntl.h>

#include <utility>

#include "../shm/error.h"
#include "../shm/unique_fd.h"

namespace ddpx::health {

std::optional<PageView> open_page(const Introduction& rank, int world_size) {
  const auto path =
      "/proc/" + std::to_string(rank.process.pid) + "/fd/" + std::to_string(rank.page_fd);
  const shm::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    return std::nullopt;
  }
  try {
    auto mapping = shm::map_shared(fd.get());
    if (mapping->num_bytes() < PageLayout::num_bytes(world_size)) {
      return std::nullopt;
    }
    PageView page(std::move(mapping));
    const bool is_right = page.layout().token.load(std::memory_order_relaxed) == rank.token;
    return is_right ? std::make_optional(std::move(page)) : std::nullopt;
  } catch (const shm::Error&) {
    return std::nullopt;  // the number stands for some other file
  }
}

Peer::Peer(Introduction introduction, const ProcessId& self, std::shared_ptr<HostTable> host)
    : introduction_(std::move(introduction)), host_(std::move(host)) {
  if (introduction_.process.machine != self.machine) {
    return;
  }
  page_ = open_page(introduction_, /*world_size=*/1);
  watch_ = std::make_unique<ProcessWatch>(introduction_.process);
  const bool is_member = host_ && host_->is_member(rank());
  if (!page_ && watch_->ended() && !is_member) {
    watch_.reset();
  }
}

const HostTable::Rank* Peer::entry() const {
  return host_ ? &host_->rank(rank()) : nullptr;
}

std::optional<Activity> Peer::activity() const {
  if (page_) {
    return page_->activity();
  }
  const bool is_known = entry() != nullptr && entry()->since_ns != 0;
  return is_known ? std::make_optional(Activity::unpacked(entry()->activity, entry()->since_ns))
                  : std::nullopt;
}

std::optional<Progress> Peer::progress() const {
  if (page_) {
    return page_->progress();
  }
  const bool is_known = entry() != nullptr && entry()->since_ns != 0;
  return is_known ? std::make_optional(Progress::unpacked(entry()->progress)) : std::nullopt;
}

int64_t Peer::heard_ns() const {
  return entry() != nullptr ? entry()->heard_ns.load() : 0;
}

}  // namespace ddpx::health
