// An all-reduce over several hosts: through shared memory within hosts, through gloo between hosts.
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

// The all-reduces of one rank. Owned by ShmBackend. Thread-safe; no lock is needed, and the callee
// takes `mutex_`. An all-reduce has three parts: a reduction within each host, an all-reduce among
// the leaders, and a broadcast within each host. The object's own thread runs one all-reduce after
// another. The leader of a host is its first rank. The second thread of a leader reads failures of
// other hosts from the bulletin, and answers queries. The owner must call close(), since both
// threads share the ownership of the object.
class BetweenHosts : public std::enable_shared_from_this<BetweenHosts> {
 public:
  struct AllReduce {
    at::Tensor tensor;
    shm::Call call;  // in place on the tensor's memory; `call.timeout` must be set
    c10d::ReduceOp op;
    c10::intrusive_ptr<ShmWork> work;
  };

  BetweenHosts(
      std::shared_ptr<shm::Group> local, const c10::intrusive_ptr<c10d::Store>& store, int rank);

  // Ends pending operations with an error, and leaves the local group. A thread that waits for a
  // store that does not answer is not awaited for long: the thread ends when the store answers.
  void close();

  // Gives the gloo backend of the leaders. To be called on leaders only.
  void set_leaders(c10::intrusive_ptr<c10d::Backend> leaders);

  void submit(AllReduce operation);

  // Fails all pending and later operations on all hosts.
  void fail(const std::string& reason);

  // The same with an error that the local group has already. With too little memory, other hosts
  // may not learn of it.
  void fail_with(const std::exception_ptr& error) noexcept;

  // Like `fail`, but does not wait for the store. The leader's second thread informs the other
  // hosts later.
  void abort(const std::string& reason);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void start(std::thread& thread, void (BetweenHosts::*body)(), const Lock& lock);
  void work();
  std::exception_ptr error_of(const AllReduce& operation) noexcept;
  void carry_out(const AllReduce& operation);
  void reduce_among_leaders(const AllReduce& operation);
  void await(c10d::Work& work);
  void watch();
  void watch_until_failure();
  std::string query_leaders(const std::string& cause);
  std::optional<std::string> evaluate_answers(const std::string& cause, bool last);
  void throw_failure() const;
  std::string publish(const std::string& failure);
  void end_with(const std::string& failure);

  std::shared_ptr<shm::Group> local_;
  Bulletin bulletin_;
  int rank_;
  std::vector<int> leader_ranks_;
  c10::intrusive_ptr<c10d::Backend> leaders_;
  std::atomic<uint64_t> num_begun_{0};  // all-reduces that this leader has begun

  mutable std::mutex mutex_;  // guards the members up to `num_threads_`
  std::condition_variable changed_;
  std::deque<AllReduce> pending_;
  std::optional<std::string> failure_;  // if set, all operations end with this error
  bool closed_ = false;
  int num_threads_ = 0;  // threads that have not ended

  std::thread thread_;   // runs operations; started by the first of them
  std::thread watcher_;  // the second thread of a leader
};

}  // namespace ddpx
