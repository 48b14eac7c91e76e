#include "between_hosts.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "../os/threads.h"
#include "../shm/error.h"

namespace ddpx {
namespace {

constexpr const char* kPhase = "all_reduce between hosts";

// Small enough that the link starts early and ends late; large enough that the local steps of a
// chunk cost little.
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;

// A lane is idle while its two ends start the next chunk. Two lanes keep the link busy.
constexpr std::size_t kMinLanes = 2;

// Poll interval for failures of the local groups, while an exchange runs.
constexpr auto kPeriod = std::chrono::milliseconds(100);

// Added to the timeouts of later stages. The stage with the missing rank then times out first, and
// its error names that rank.
constexpr auto kForOtherHosts = std::chrono::seconds(5);
constexpr auto kForLane = std::chrono::seconds(10);

// Time for which close() waits for exchanges in flight.
constexpr auto kCloseTime = std::chrono::seconds(2);

// Destroys lanes on a thread of its own, since gloo's destructor waits for operations in flight,
// and waits for at most `time`. Without such a thread, the lanes stay.
void destroy(std::vector<BetweenHosts::Lane> lanes, std::chrono::nanoseconds time = {}) {
  const auto* kept = new std::vector<BetweenHosts::Lane>(std::move(lanes));
  const auto done = std::make_shared<std::promise<void>>();
  const bool started = os::start_thread([kept, done] {
    delete kept;
    done->set_value();
  });
  if (started) {
    done->get_future().wait_for(time);
  }
}

}  // namespace

struct BetweenHosts::Chunk {
  std::shared_ptr<const AllReduce> operation;
  std::byte* data = nullptr;
  std::size_t count = 0;  // elements, as in `call` of the operation
  std::size_t lane = 0;
  bool last = false;   // of its operation
  bool ready = false;  // for `pass`; guarded by `mutex_`

  at::Tensor tensor() const {
    const auto dtype = c10::toRealValueType(operation->tensor.scalar_type());
    return at::from_blob(data, {static_cast<int64_t>(count)}, at::TensorOptions(dtype));
  }
};

std::vector<std::vector<int>> lanes_between(const shm::Topology& topology) {
  std::vector<std::vector<int>> lanes;
  if (topology.hosts.size() == 1) {
    return lanes;
  }
  auto width = topology.hosts.front().size();
  for (const auto& host : topology.hosts) {
    width = std::min(width, host.size());
  }
  for (std::size_t lane = 0; lane < std::max(width, kMinLanes); ++lane) {
    auto& ranks = lanes.emplace_back();
    for (const auto& host : topology.hosts) {
      ranks.push_back(host[lane % width]);
    }
  }
  return lanes;
}

BetweenHosts::BetweenHosts(
    std::shared_ptr<shm::Group> reducing, std::shared_ptr<shm::Group> passing, int rank)
    : rank_(rank),
      lane_ranks_(lanes_between(reducing->topology())),
      reducing_(std::move(reducing)),
      passing_(std::move(passing)),
      lanes_(lane_ranks_.size()) {}

void BetweenHosts::set_lane(std::size_t index, Lane lane) {
  const Lock lock(mutex_);
  lanes_.at(index) = std::move(lane);
}

void BetweenHosts::close() {
  if (reducing_->is_forked()) {
    // In a forked child, neither the thread nor gloo's threads exist.
    if (thread_.joinable()) {
      thread_.detach();
    }
    destroy(std::move(lanes_));
    return;
  }
  std::vector<Lane> lanes;
  {
    const Lock lock(mutex_);
    closed_ = true;
    lanes = std::exchange(lanes_, std::vector<Lane>(lane_ranks_.size()));
  }
  changed_.notify_all();
  reducing_->leave();
  passing_->leave();
  if (thread_.joinable()) {
    thread_.join();
  }
  destroy(std::move(lanes), kCloseTime);
}

// ---- stage 1: the ranks of a host reduce a chunk ------------------------------------------------

void BetweenHosts::submit(AllReduce operation) {
  const auto shared = std::make_shared<const AllReduce>(std::move(operation));
  const auto chunk_elements = kChunkBytes / shm::size_of(shared->call.dtype);
  const Lock lock(mutex_);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { this->work(); });
  }
  std::size_t begin = 0;
  do {
    const auto count = std::min(chunk_elements, shared->call.count - begin);
    submit_chunk(shared, begin, count);
    begin += count;
  } while (begin < shared->call.count);
  changed_.notify_all();
}

void BetweenHosts::submit_chunk(
    const std::shared_ptr<const AllReduce>& operation, std::size_t begin, std::size_t count) {
  const auto& call = operation->call;
  const auto chunk = std::make_shared<Chunk>();
  chunk->operation = operation;
  chunk->data = static_cast<std::byte*>(call.output) + begin * shm::size_of(call.dtype);
  chunk->count = count;
  chunk->lane = num_chunks_++ % lane_ranks_.size();
  chunk->last = begin + count == call.count;
  const auto op = call.op == shm::ReduceOp::kAvg ? shm::ReduceOp::kSum : call.op;
  auto reduce = shm::all_reduce_call(chunk->data, chunk->data, count, call.dtype, op);
  reduce.timeout = call.timeout;
  pending_.push_back(chunk);
  reducing_->submit(
      std::move(reduce), [this, chunk](std::exception_ptr error) { on_reduced(chunk, error); });
}

// Runs on the thread of `reducing_`.
void BetweenHosts::on_reduced(const ChunkPtr& chunk, const std::exception_ptr& error) noexcept {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
    if (is_on_lane(*chunk) && chunk->count > 0) {
      exchange(chunk);
    } else {
      mark_ready(*chunk);
    }
  } catch (...) {
    fail_with(std::current_exception());
  }
}

// ---- stage 2: the hosts exchange a chunk --------------------------------------------------------

bool BetweenHosts::is_on_lane(const Chunk& chunk) const {
  const auto& ranks = lane_ranks_[chunk.lane];
  return std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
}

void BetweenHosts::exchange(const ChunkPtr& chunk) {
  const auto& operation = *chunk->operation;
  const bool average = operation.call.op == shm::ReduceOp::kAvg;
  c10d::AllreduceOptions options;
  options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation.op;
  options.timeout = operation.call.timeout + kForOtherHosts;
  std::vector<at::Tensor> tensors = {chunk->tensor()};
  c10::intrusive_ptr<c10d::Work> work;
  {
    const Lock lock(mutex_);
    if (failure_ || closed_) {
      return;
    }
    work = lanes_[chunk->lane]->allreduce(tensors, options);
  }
  // The callback keeps the chunk, and with it the memory that gloo uses. If the exchange has ended,
  // the callback runs at once, so `mutex_` must be free here.
  work->getFuture()->addCallback([weak = weak_from_this(), chunk](c10::ivalue::Future& future) {
    if (const auto self = weak.lock()) {
      self->on_exchanged(*chunk, future.hasError() ? future.exception_ptr() : nullptr);
    }
  });
}

// Runs on gloo's thread.
void BetweenHosts::on_exchanged(Chunk& chunk, const std::exception_ptr& error) noexcept {
  if (!error) {
    mark_ready(chunk);
    return;
  }
  try {
    auto others = lane_ranks_[chunk.lane];
    std::erase(others, rank_);
    fail(
        {shm::ErrorKind::kPeerLost,
         "the exchange with " + reducing_->topology().name(others) +
             " on other hosts failed. A rank of their hosts died, failed or is late: see the "
             "output of the ranks there. The group cannot continue: restart the job. gloo said: " +
             shm::text_of(error)});
  } catch (...) {
    fail_with(std::current_exception());
  }
}

void BetweenHosts::mark_ready(Chunk& chunk) {
  {
    const Lock lock(mutex_);
    chunk.ready = true;
  }
  changed_.notify_all();
}

// ---- stage 3: the rank of the lane passes a chunk to the ranks of its host ----------------------

// Body of this object's thread.
void BetweenHosts::work() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
    if (pending_.empty()) {
      return;
    }
    const auto chunk = pending_.front();
    const bool ready = await(*chunk, lock);
    pending_.pop_front();
    lock.unlock();
    // After a failure no chunk is passed, so the last chunk speaks for its operation.
    const bool passed = ready && pass(*chunk);
    if (chunk->last) {
      chunk->operation->work->end(passed ? nullptr : error());
    }
    lock.lock();
  }
}

// Returns false if the group has failed or was destroyed.
bool BetweenHosts::await(const Chunk& chunk, Lock& lock) {
  const auto ended = [&] { return chunk.ready || failure_ || closed_; };
  while (!changed_.wait_for(lock, kPeriod, ended)) {
    lock.unlock();
    for (auto* group : {reducing_.get(), passing_.get()}) {
      if (const auto failure = group->failure(kPhase)) {
        fail_with(std::make_exception_ptr(*failure));
      }
    }
    lock.lock();
  }
  return !failure_ && !closed_;
}

bool BetweenHosts::pass(const Chunk& chunk) noexcept {
  const auto& call = chunk.operation->call;
  try {
    if (call.op == shm::ReduceOp::kAvg && is_on_lane(chunk)) {
      const at::NoGradGuard no_grad;
      chunk.tensor().div_(static_cast<int64_t>(reducing_->topology().size()));
    }
    const auto& topology = reducing_->topology();
    const auto host = topology.host_of[static_cast<std::size_t>(rank_)];
    const int source = lane_ranks_[chunk.lane][static_cast<std::size_t>(host)];
    auto pass = shm::broadcast_call(
        chunk.data,
        chunk.count,
        call.dtype,
        topology.local_rank_of[static_cast<std::size_t>(source)]);
    pass.timeout = call.timeout + kForOtherHosts + kForLane;
    passing_->run(std::move(pass));
    return true;
  } catch (...) {
    fail_with(std::current_exception());
    return false;
  }
}

// ---- failures -----------------------------------------------------------------------------------

// The groups fail before the operations of this rank end: this rank may exit then, and its peers
// must report the failure instead of the exit.
void BetweenHosts::fail(const shm::Failure& failure) {
  const auto first = passing_->fail(failure, kPhase);
  reducing_->fail(failure, kPhase);
  std::vector<Lane> lanes;
  {
    const Lock lock(mutex_);
    if (failure_) {
      return;
    }
    failure_ = shm::failure_of(first);
    lanes = std::exchange(lanes_, std::vector<Lane>(lane_ranks_.size()));
  }
  changed_.notify_all();
  destroy(std::move(lanes));
}

void BetweenHosts::fail_with(const std::exception_ptr& error) noexcept {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const shm::Error&) {
      throw;
    } catch (...) {
      std::rethrow_exception(reducing_->fail_with_current_exception(kPhase));
    }
  } catch (const shm::Error& cause) {
    try {
      return fail(shm::failure_of(cause));
    } catch (...) {
      // no memory, see below
    }
  } catch (...) {
    // no memory, see below
  }
  const Lock lock(mutex_);
  if (!failure_) {
    failure_.emplace(shm::ErrorKind::kOutOfMemory, "no memory", rank_);  // allocates nothing
  }
}

// The error of operations after a failure, or after close().
std::exception_ptr BetweenHosts::error() const noexcept {
  const Lock lock(mutex_);
  try {
    if (failure_) {
      return std::make_exception_ptr(
          shm::Error(
              failure_->kind,
              shm::opening(reducing_->topology().name({rank_}), kPhase) + failure_->text));
    }
    return std::make_exception_ptr(
        shm::Error(shm::ErrorKind::kAborted, "[ddpx shm] the process group was destroyed"));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace ddpx
