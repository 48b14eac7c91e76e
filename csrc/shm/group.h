// The interface of the shared-memory transport: a group of ranks, and its operations.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "queue.h"

namespace ddpx::shm {

struct GroupOptions {
  Order order = Order::kGloo;
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};  // default for an operation
  std::chrono::milliseconds rendezvous_timeout{std::chrono::minutes(5)};
  HomeSizes sizes{std::size_t{64} << 10, std::size_t{512} << 10};  // must be equal on all ranks
  std::optional<SpinPolicy> spin_policy;                           // default: choose_spin_policy()
  std::string host_identity;                                       // see RendezvousOptions
  std::vector<int> in_job;                                         // see Topology
};

// One rank's membership in a group. The backend owns it, and each pending operation shares its
// queue. Thread-safe. Operations are among the ranks of one host (`topology().local_ranks(rank)`).
// They run in the order in which they are submitted, which must be the same on all these ranks. A
// group has at most one thread of its own. After a failure, all operations on all local ranks fail
// for the same reason.
class Group {
 public:
  // Collective over all ranks of all hosts. Without an `arena`, no operation works in place.
  Group(
      Channel& channel,
      int rank,
      int size,
      const GroupOptions& options,
      std::shared_ptr<Arena> arena);

  ~Group();

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const Topology& topology() const {
    return topology_;
  }

  // Whether this process was forked off from the one that made the group.
  bool is_forked() const;

  // Throws kMisuse in a forked child, which would take the place of its parent in a call.
  void check_process() const;

  // Throws kMisuse if the call is invalid, or in a forked child. If the call cannot be queued,
  // because of missing memory or threads, the group fails and `submit` throws. The handle reports
  // all other errors.
  OperationHandle submit(Call call, Completion completion = {}) {
    check_process();
    return queue_->submit(std::move(call), std::move(completion));
  }

  // Runs the operation, and pending ones before it, on the calling thread unless another thread
  // does. Throws the error of the operation.
  void run(Call call, Completion completion = {}) {
    check_process();
    queue_->run(std::move(call), std::move(completion));
  }

  // Leaves the group, as the destructor does. Pending operations fail, also on peers that need this
  // rank for them. Later calls of `submit` and `run` throw. Does nothing in a forked child, since
  // the group belongs to the parent.
  void leave();

  // Fails all pending and later operations on all local ranks. Does nothing in a forked child.
  void abort(const std::string& reason);

  // The same for a failure outside the group's own operations. The first failure of a group is
  // kept. It is returned as the error of this rank in `phase`.
  Error fail(const Failure& failure, const std::string& phase) {
    return queue_->fail(failure, phase);
  }

  // The same for the exception that is being handled: a rank that leaves out a call must not make
  // later calls. Recording the failure allocates no memory. Returns the error of this rank in
  // `phase`, or the exception itself if there is no memory for an error.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept {
    return queue_->fail_with_current_exception(phase);
  }

  // The failure of the group as the error of this rank in `phase`; nullopt if there is none.
  std::optional<Error> failure(const std::string& phase) {
    return queue_->failure(phase);
  }

 private:
  int rank_;
  uint64_t num_forks_;
  Topology topology_;
  std::shared_ptr<OperationQueue> queue_;
};

}  // namespace ddpx::shm
