#include "launch_queue.h"

#include <string>

#include "../errors.h"

namespace ddpx {

void LaunchQueue::mark_ready(std::size_t bucket_index) {
  if (ready_.at(bucket_index)) {
    throw InternalError("bucket " + std::to_string(bucket_index) + " became ready twice");
  }
  ready_[bucket_index] = true;
}

std::optional<std::size_t> LaunchQueue::pop() {
  if (num_launched_ == ready_.size() || !ready_[num_launched_]) {
    return std::nullopt;
  }
  return num_launched_++;
}

}  // namespace ddpx
