// An all-reduce over several hosts: within each through shared memory, between them through gloo.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "../shm/group.h"
#include "shm_work.h"

namespace ddpx {

// Each all-reduce is three operations (reduce within the host, all-reduce between the leaders,
// share back), so they are carried out one after another by a thread of its own. Thread-safe.
class BetweenHosts {
 public:
  struct AllReduce {
    at::Tensor tensor;
    shm::Call call;  // in place
    c10d::ReduceOp op;
    int world_size;
    c10::intrusive_ptr<ShmWork> work;
  };

  explicit BetweenHosts(std::shared_ptr<shm::Group> local) : local_(std::move(local)) {}

  // Ends what has not ended with an error.
  ~BetweenHosts();

  // Of the first rank of each host; on these ranks only.
  void set_leaders(c10::intrusive_ptr<c10d::Backend> leaders) {
    leaders_ = std::move(leaders);
  }

  void submit(AllReduce operation);

 private:
  void work();
  void carry_out(const AllReduce& operation);

  std::shared_ptr<shm::Group> local_;
  c10::intrusive_ptr<c10d::Backend> leaders_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AllReduce> pending_;
  bool closed_ = false;
  std::thread thread_;  // started by the first operation
};

}  // namespace ddpx
