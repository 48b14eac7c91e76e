#include "group.h"

#include <unistd.h>

#include "error.h"

namespace ddpx::shm {
namespace {

std::unique_ptr<Team> assemble(
    Channel& channel,
    int rank,
    int size,
    const GroupOptions& options,
    std::shared_ptr<Arena> arena) {
  if (rank < 0 || rank >= size) {
    throw Error(
        ErrorKind::kMisuse,
        "[ddpx shm] there is no rank " + std::to_string(rank) + " among " + std::to_string(size));
  }
  auto meeting =
      meet(channel, rank, size, {options.sizes, options.meeting_timeout, options.host_identity});
  const auto num_local_ranks = static_cast<int>(meeting.neighbours.size());
  const auto patience = options.patience.value_or(choose_patience(num_local_ranks, usable_cores()));
  return std::make_unique<Team>(
      std::move(meeting),
      rank,
      TeamOptions{options.order, options.timeout, patience},
      std::move(arena));
}

}  // namespace

Group::Group(
    Channel& channel, int rank, int size, const GroupOptions& options, std::shared_ptr<Arena> arena)
    : rank_(rank), owner_(getpid()) {
  auto team = assemble(channel, rank, size, options, std::move(arena));
  topology_ = team->peers().topology();
  queue_ = std::make_shared<OperationQueue>(std::move(team));
}

Group::~Group() {
  leave();
}

void Group::leave() {
  if (getpid() == owner_) {
    queue_->close();
  } else {
    queue_->abandon();
  }
}

void Group::abort(const std::string& reason) {
  queue_->fail(
      {ErrorKind::kAborted, "rank " + std::to_string(rank_) + " aborted the group: " + reason},
      "abort");
}

}  // namespace ddpx::shm
