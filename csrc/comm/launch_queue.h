// Launches ready buckets strictly in plan order: collectives pair up across ranks by their order.
#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <vector>

namespace ddpx {

// The buckets of one step. The step owns the queue, under the mutex of the reducer. One thread
// launches at a time.
class LaunchQueue {
 public:
  explicit LaunchQueue(std::size_t num_buckets) : ready_(num_buckets, false) {}

  // Throws InternalError if the bucket is ready already.
  void mark_ready(std::size_t bucket_index);

  // Takes the next bucket in plan order out of the queue, if that bucket is ready.
  std::optional<std::size_t> pop();

  // Calls `launch` with each ready bucket in plan order, unless a thread does so already: `launch`
  // may release the mutex, and the launching thread also takes what others make ready meanwhile.
  // After an error of `launch` no thread launches: peers would pair the next bucket with the one
  // that failed.
  template <class Launch>
  void launch_ready(const Launch& launch) {
    if (launching_) {
      return;
    }
    launching_ = true;
    try {
      while (const auto bucket_index = pop()) {
        launch(*bucket_index);
      }
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    launching_ = false;
  }

  // Throws the error of the launch that failed, if any.
  void rethrow_error() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  // Whether all buckets were taken out.
  bool empty() const {
    return num_launched_ == ready_.size();
  }

  // Whether all buckets are launched.
  bool ended() const {
    return empty() && !launching_;
  }

 private:
  std::vector<bool> ready_;
  std::size_t num_launched_ = 0;
  bool launching_ = false;    // a thread launches, or a launch has failed
  std::exception_ptr error_;  // of the launch that failed
};

}  // namespace ddpx
