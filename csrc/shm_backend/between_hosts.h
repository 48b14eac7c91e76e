// An all-reduce over several hosts: within each through shared memory, between them through gloo.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../shm/group.h"
#include "bulletin.h"
#include "shm_work.h"

namespace ddpx {

// Each all-reduce is three operations (reduce within the host, all-reduce between the leaders,
// share back), so they are carried out one after another by a thread of its own. The first rank of
// a host leads it, and has a second thread: it reads the bulletin, so that the ranks of its host
// hear of failures elsewhere, and answers when the roll is called. Thread-safe.
class BetweenHosts {
 public:
  struct AllReduce {
    at::Tensor tensor;
    shm::Call call;  // in place, on the tensor's memory; with its timeout
    c10d::ReduceOp op;
    c10::intrusive_ptr<ShmWork> work;
  };

  BetweenHosts(
      std::shared_ptr<shm::Group> local, const c10::intrusive_ptr<c10d::Store>& store, int rank);

  // Ends what has not ended with an error.
  ~BetweenHosts();

  // Of the first rank of each host; on these ranks only.
  void set_leaders(c10::intrusive_ptr<c10d::Backend> leaders);

  void submit(AllReduce operation);

  // Fails all operations from now on, on all hosts.
  void fail(const std::string& reason);

  // The same with an error that this host has been told already. Does as much as memory allows.
  void fail_with(const std::exception_ptr& error) noexcept;

  // The same as `fail`, without waiting for the store: other hosts hear of it a little later, if
  // this rank leads its host.
  void abort(const std::string& reason);

 private:
  void work();
  std::exception_ptr error_of(const AllReduce& operation) noexcept;
  void carry_out(const AllReduce& operation);
  void reduce_among_leaders(const AllReduce& operation);
  void await(c10d::Work& work);
  void watch();
  void watch_until_failure();
  std::string find_out(const std::string& cause);
  std::optional<std::string> look_for_culprit(const std::string& cause, bool last);
  void throw_failure() const;
  std::string tell(const std::string& failure);
  void end_with(const std::string& failure);

  std::shared_ptr<shm::Group> local_;
  Bulletin bulletin_;
  int rank_;
  std::vector<int> leader_ranks_;
  c10::intrusive_ptr<c10d::Backend> leaders_;
  std::atomic<uint64_t> num_begun_{0};  // all-reduces between hosts, by this leader

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<AllReduce> pending_;
  std::optional<std::string> failure_;  // once there is one, all operations end with it
  bool closed_ = false;

  std::thread thread_;   // started by the first operation
  std::thread watcher_;  // of a leader
};

}  // namespace ddpx
