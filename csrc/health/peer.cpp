#include "peer.h"

#include <fcntl.h>

#include <cerrno>

#include <sstream>

#include "../shm/error.h"
#include "../shm/unique_fd.h"

namespace ddpx::health {
namespace {

enum class Found { kPage, kStale, kNothing };

Found find_page(const Introduction& introduction, std::optional<PageView>& page) {
  const auto path = "/proc/" + std::to_string(introduction.process.pid) + "/fd/" +
                    std::to_string(introduction.page_fd);
  const shm::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    return errno == ENOENT ? Found::kStale : Found::kNothing;
  }
  try {
    auto mapping = shm::map_shared(fd.get());
    if (mapping->num_bytes() < sizeof(PageLayout)) {
      return Found::kStale;
    }
    PageView view(std::move(mapping));
    if (view.layout().token.load(std::memory_order_relaxed) != introduction.token) {
      return Found::kStale;
    }
    view.layout().num_readers.fetch_add(1);
    page = std::move(view);
    return Found::kPage;
  } catch (const shm::Error&) {
    return Found::kStale;  // that number stands for some other file now
  }
}

}  // namespace

std::shared_ptr<Peer> Peer::meet(
    int rank, const Introduction& introduction, const ProcessId& self) {
  std::shared_ptr<Peer> peer(new Peer(rank, introduction));
  if (introduction.process.machine != self.machine) {
    return peer;
  }
  peer->watch_ = std::make_unique<ProcessWatch>(introduction.process);
  if (!peer->watch_->ended() && find_page(introduction, peer->page_) == Found::kStale &&
      !peer->watch_->ended()) {
    return nullptr;
  }
  return peer;
}

std::optional<Activity> Peer::activity() const {
  if (page_) {
    return page_->activity();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return beat_ ? std::make_optional(beat_->activity) : std::nullopt;
}

std::optional<Progress> Peer::progress() const {
  if (page_) {
    return page_->progress();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return beat_ ? std::make_optional(beat_->progress) : std::nullopt;
}

void Peer::heard(const Beat& beat) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!beat_ || beat_->count != beat.count) {
    heard_ns_ = now_ns();
  }
  const auto since = beat_ && beat_->activity.packed() == beat.activity.packed()
                         ? beat_->activity.since_ns
                         : now_ns();  // clocks of other machines say nothing here
  beat_ = beat;
  beat_->activity.since_ns = since;
}

int64_t Peer::silent_since_ns() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return heard_ns_;
}

std::string Peer::Beat::to_text() const {
  std::ostringstream out;
  out << count << ' ' << activity.packed() << ' ' << progress.packed();
  return out.str();
}

std::optional<Peer::Beat> Peer::Beat::from_text(const std::string& text) {
  std::istringstream in(text);
  uint64_t count = 0;
  uint64_t activity = 0;
  uint64_t progress = 0;
  in >> count >> activity >> progress;
  return in ? std::make_optional(
                  Beat{count, Activity::unpacked(activity, 0), Progress::unpacked(progress)})
            : std::nullopt;
}

}  // namespace ddpx::health
