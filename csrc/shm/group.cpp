#include "group.h"

#include "../count.h"
#include "../os/forks.h"
#include "error.h"

namespace ddpx::shm {
namespace {

std::unique_ptr<Team> make_team(
    Channel& channel,
    int rank,
    int size,
    const GroupOptions& options,
    std::shared_ptr<Arena> arena) {
  if (rank < 0 || rank >= size) {
    throw Error(
        ErrorKind::kMisuse,
        "[ddpx shm] rank " + std::to_string(rank) + " does not exist in a group of " +
            count(size, "rank") + ". Ranks count from 0.");
  }
  auto result = run_rendezvous(
      channel,
      rank,
      size,
      {options.sizes, options.rendezvous_timeout, options.host_identity, options.in_job});
  std::vector<os::CpuLimits> limits;
  for (const auto& peer : result.local_peers) {
    limits.push_back(peer.home->home().cpu_limits);
  }
  const auto spin_policy =
      options.spin_policy.value_or(choose_spin_policy(limits, result.topology.local_rank_of[rank]));
  if (arena) {
    const auto& first = result.local_peers.front().home;
    arena->share_reservations({first, &first->home().shared.reserved_bytes});
  }
  return std::make_unique<Team>(
      std::move(result),
      rank,
      TeamOptions{options.order, options.timeout, spin_policy},
      std::move(arena));
}

}  // namespace

Group::Group(
    Channel& channel, int rank, int size, const GroupOptions& options, std::shared_ptr<Arena> arena)
    : rank_(rank), num_forks_(os::num_forks()) {
  auto team = make_team(channel, rank, size, options, std::move(arena));
  topology_ = team->peers().topology();
  queue_ = std::make_shared<OperationQueue>(std::move(team));
}

Group::~Group() {
  leave();
}

void Group::leave() {
  if (is_forked()) {
    queue_->leak();
  } else {
    queue_->close();
  }
}

bool Group::is_forked() const {
  return num_forks_ != os::num_forks();
}

void Group::check_process() const {
  if (is_forked()) {
    throw Error(
        ErrorKind::kMisuse,
        "[ddpx shm " + topology_.name({rank_}) +
            "] this process was forked off after the process group was made, and is not a rank of "
            "the group. Start the process by spawn, and make a process group in it.");
  }
}

void Group::abort(const std::string& reason) {
  if (is_forked()) {
    return;
  }
  queue_->fail(
      {ErrorKind::kAborted, topology_.name({rank_}) + " aborted the group: " + reason}, "abort");
}

}  // namespace ddpx::shm
