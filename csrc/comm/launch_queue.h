// Ready buckets leave strictly in plan order: collectives pair up across ranks by their order.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace ddpx {

// Not thread-safe: the reducer's mutex guards it.
class LaunchQueue {
 public:
  // Forgets the last step; `num_buckets` are to leave in this one.
  void reset(std::size_t num_buckets);

  // Throws InternalError if the bucket is ready already.
  void mark_ready(std::size_t bucket_index);

  // The next bucket in plan order if it is ready; it has then left.
  std::optional<std::size_t> pop();

  std::size_t num_launched() const {
    return num_launched_;
  }

 private:
  std::vector<bool> ready_;
  std::size_t num_launched_ = 0;
};

}  // namespace ddpx
