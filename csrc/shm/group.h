// The shared-memory transport as others use it: a group of ranks, and its operations.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "queue.h"

namespace ddpx::shm {

struct GroupOptions {
  Order order = Order::kGloo;
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};  // of an operation
  std::chrono::milliseconds meeting_timeout{std::chrono::minutes(5)};
  HomeSizes sizes{std::size_t{64} << 10, std::size_t{512} << 10};  // the same on all ranks
  std::optional<Patience> patience;  // chosen by cores and local ranks, if not given
  std::string host_identity;         // see MeetingOptions
};

// Operations are among the ranks of one host (`topology().neighbours(rank)`), in the order in which
// they are submitted, which must be the same on all of them. Thread-safe; at most one thread of its
// own. After any failure all operations fail, on all local ranks, with the same reason.
class Group {
 public:
  // Collective over all ranks, of all hosts. `arena` may be null: then nothing is done in place.
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

  // This rank's place among the ranks of its host.
  int local_rank() const {
    return topology_.local_rank_of[rank_];
  }

  int local_size() const {
    return static_cast<int>(topology_.neighbours(rank_).size());
  }

  // Throws at once if the call makes no sense (kMisuse) or could not be queued, for want of memory
  // or of a thread; then the group has failed. All else comes with the ticket.
  Ticket submit(Call call, Completion completion = {}) {
    return queue_->submit(std::move(call), std::move(completion));
  }

  // Carries it out on this thread, once it is its turn. Throws what ended it.
  void run(Call call, Completion completion = {}) {
    queue_->run(std::move(call), std::move(completion));
  }

  // As the destructor does: operations that have not ended fail, and fail for peers that need this
  // rank for them; none can be submitted any more. In a forked child nothing happens: the group is
  // the parent's.
  void leave();

  // Fails all operations, on all local ranks, from now on.
  void abort(const std::string& reason);

  // The same, for what local ranks do together by other means. The first failure stands; it is
  // returned as the error of this rank at `phase`.
  Error fail(const Failure& failure, const std::string& phase) {
    return queue_->fail(failure, phase);
  }

  // The same for the exception that is being handled: a rank that could not make a call must not
  // make the ones after it. Needs no memory. Returns the error of this rank at `phase`, or the
  // exception itself if there is no memory for an error.
  std::exception_ptr fail_with_current_exception(const char* phase) noexcept {
    return queue_->fail_with_current_exception(phase);
  }

  // Nothing as long as the group has not failed.
  std::optional<Error> failure(const std::string& phase) {
    return queue_->failure(phase);
  }

  // Local ranks that are gone. They may have done all that others need of them.
  std::vector<Loss> losses() {
    return queue_->losses();
  }

 private:
  int rank_;
  pid_t owner_;
  Topology topology_;
  std::shared_ptr<OperationQueue> queue_;
};

}  // namespace ddpx::shm
