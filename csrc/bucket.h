// The flat buffer of one bucket, with a slot per gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucket_plan.h"
#include "collective.h"
#include "stream_join.h"

namespace ddpx {

struct Slot {
  std::size_t param_index;
  at::Tensor view;  // of the bucket's buffer, with the sizes and, if dense, strides of the param
};

//   buffer  | slot 0 | slot 1 |   ...   | slot n-1 |      one dtype, one device, no padding
//
// A sparse bucket has one slot without a view; its buffer is the step's sparse gradient itself.
// Owned by the reducer, guarded by its mutex; slot views may outlive it as gradients.
class Bucket {
 public:
  Bucket(
      const BucketSpec& spec,
      const std::vector<at::Tensor>& params,
      bool sparse,
      Collective& collective);

  const std::vector<Slot>& slots() const {
    return slots_;
  }
  bool sparse() const {
    return sparse_;
  }

  // Starts a step: every gradient is outstanding.
  void begin_step();

  // One gradient was just packed, on the current device stream; true if it was the last one. Throws
  // InternalError if none was outstanding.
  bool fill_one();

  // Takes this step's sparse gradient as the buffer.
  void set_sparse(at::Tensor grad);

  // Starts the all-reduce of the buffer.
  void launch(Collective& collective);

  // Waits for the all-reduce: on CPU until it is done, on a device by making the current stream
  // wait. Rethrows what the backend throws.
  void wait();

  // The buffer: after wait(), the sum over ranks of what was packed.
  const at::Tensor& buffer() const {
    return buffer_;
  }

 private:
  c10::Device device_;
  bool sparse_;
  at::Tensor buffer_;
  std::vector<Slot> slots_;
  std::size_t num_outstanding_ = 0;
  StreamJoin streams_;
  Collective::Work work_;
};

}  // namespace ddpx
