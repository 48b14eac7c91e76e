// The memory of tensors that a collective uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "queue.h"

namespace late {

// References to the tensors of one collective. As NCCL since torch 2.8, the backend does not record
// the tensors on the stream of the collective. So the memory is reused too early if a stream other
// than the one that waited for the collective frees the memory. Thread-safe.
class Stash {
 public:
  explicit Stash(std::vector<at::Tensor> tensors);

  // Drops the references. To be called after a stream has waited for the collective.
  void clear();

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> tensors_;
};

// Keeps the stash of a collective that nothing waits for. The next call of this function after the
// task at `end` of the queue has run clears the stash.
void clear_after(const std::shared_ptr<Stash>& stash, Queue& queue, Position end);

}  // namespace late
