// Launches ready buckets strictly in plan order: collectives pair up across ranks by their order.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace ddpx {

// The buckets of one step. The step owns the queue, under the mutex of the reducer.
class LaunchQueue {
 public:
  explicit LaunchQueue(std::size_t num_buckets) : ready_(num_buckets, false) {}

  // Throws InternalError if the bucket is ready already.
  void mark_ready(std::size_t bucket_index);

  // Takes the next bucket in plan order out of the queue, if that bucket is ready.
  std::optional<std::size_t> pop();

  // Whether all buckets were taken out.
  bool empty() const {
    return num_launched_ == ready_.size();
  }

 private:
  std::vector<bool> ready_;
  std::size_t num_launched_ = 0;
};

}  // namespace ddpx
