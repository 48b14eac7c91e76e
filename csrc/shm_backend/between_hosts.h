// An all-reduce over several hosts: through shared memory within hosts, through gloo between hosts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "../shm/failure.h"
#include "../shm/group.h"
#include "shm_work.h"

namespace ddpx {

// The ranks of each lane. A lane connects one rank of each host, in the order of hosts. Hosts may
// have different numbers of ranks, so the smallest host limits the number of ranks with lanes.
std::vector<std::vector<int>> lanes_between(const shm::Topology& topology);

// The all-reduces of one rank. Owned by ShmBackend, which must call close(). Thread-safe; no lock
// is needed, and the callee takes `mutex_`.
//
// Buffers are divided into chunks. A chunk passes three stages: the ranks of each host reduce it
// (`reducing`, on that group's thread); the hosts exchange it through one lane (gloo's threads);
// the rank of that lane passes it to the ranks of its host (`passing`, on this object's thread).
// Each stage takes chunks in the order of calls, so the stages of successive chunks overlap.
//
// A failure in any stage fails both groups, and closes the lanes of this rank. The exchanges of
// its counterparts then end with an error, so the other hosts fail, too.
class BetweenHosts : public std::enable_shared_from_this<BetweenHosts> {
 public:
  using Lane = c10::intrusive_ptr<c10d::Backend>;

  struct AllReduce {
    at::Tensor tensor;
    shm::Call call;  // in place on the tensor's memory; `call.timeout` must be set
    c10d::ReduceOp op;
    c10::intrusive_ptr<ShmWork> work;
  };

  // Both groups have the same ranks.
  BetweenHosts(std::shared_ptr<shm::Group> reducing, std::shared_ptr<shm::Group> passing, int rank);

  // Ends pending operations with an error, and leaves both groups.
  void close();

  // Gives the gloo backend of a lane of this rank. To be called before the first operation.
  void set_lane(std::size_t index, Lane lane);

  void submit(AllReduce operation);

  // Fails all pending and later operations. Only the first failure is kept.
  void fail(const shm::Failure& failure);

  // The same with any error of this rank.
  void fail_with(const std::exception_ptr& error) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Chunk;
  using ChunkPtr = std::shared_ptr<Chunk>;

  void submit_chunk(
      const std::shared_ptr<const AllReduce>& operation, std::size_t begin, std::size_t count);
  void on_reduced(const ChunkPtr& chunk, const std::exception_ptr& error) noexcept;
  bool is_on_lane(const Chunk& chunk) const;
  void exchange(const ChunkPtr& chunk);
  void on_exchanged(Chunk& chunk, const std::exception_ptr& error) noexcept;
  void mark_ready(Chunk& chunk);
  void work();
  bool await(const Chunk& chunk, Lock& lock);
  bool pass(const Chunk& chunk) noexcept;
  std::exception_ptr error() const noexcept;

  const int rank_;
  const std::vector<std::vector<int>> lane_ranks_;
  std::shared_ptr<shm::Group> reducing_;
  std::shared_ptr<shm::Group> passing_;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Lane> lanes_;  // by lane; null for lanes of other ranks
  std::deque<ChunkPtr> pending_;
  uint64_t num_chunks_ = 0;
  std::optional<shm::Failure> failure_;  // if set, all operations end with this error
  bool closed_ = false;
  std::thread thread_;  // started by the first operation
};

}  // namespace ddpx
