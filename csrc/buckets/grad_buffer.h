// The flat memory of one bucket, with a slot per gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../comm/collective.h"
#include "bucket_plan.h"
#include "low_precision.h"
#include "stream_set.h"

namespace ddpx {

struct Slot {
  std::size_t param_index;
  int64_t offset;   // in the buffer, in elements
  at::Tensor view;  // of the buffer, with the sizes and, if dense, strides of the param
  mutable at::Tensor grad_alias;  // alias of `view` for `param.grad`; user code may change it
  bool small = false;  // packed with the other small gradients of the bucket, by pack_all()
};

//   buffer  | slot 0 | slot 1 |   ...   | slot n-1 |      one dtype, one device, no padding
//
// A lazy buffer has memory from the first ensure_memory() of a step to drop_memory(). Between steps
// it has no views either.
//
// The buffer has the dtype in which gradients are summed: the dtype of the params, unless the user
// asked for another one. A sparse buffer has one slot without a view; its tensor is the sparse
// gradient of the step itself.
//
// The base of a bucket, which the reducer owns, under its mutex. Slot views may outlive the buffer
// as gradients.
class GradBuffer {
 public:
  GradBuffer(
      const BucketSpec& spec,
      const std::vector<at::Tensor>& params,
      bool sparse,
      Collective& collective,
      const Precision& precision = {},
      bool lazy = false);
  GradBuffer(const GradBuffer&) = delete;
  GradBuffer& operator=(const GradBuffer&) = delete;
  GradBuffer(GradBuffer&&) = default;
  GradBuffer& operator=(GradBuffer&&) = default;

  // Whether the slots have memory, which a lazy buffer lacks between steps.
  bool has_memory() const {
    return sparse_ || buffer_.defined();
  }

  // Allocates the memory of a lazy buffer, and returns true if there was none. The current stream
  // may write to the memory afterwards. `captured`: a graph is captured, which torch 2.11 cannot
  // tell.
  bool ensure_memory(
      Collective& collective, const std::vector<at::Tensor>& params, bool captured = false);

  const std::vector<Slot>& slots() const {
    return slots_;
  }
  // On a device, gradients of fewer bytes are packed together from now on, if there are several.
  void pack_small_together(int64_t below);
  bool has_small_slots() const {
    return has_small_slots_;
  }
  // The part of a dense buffer with the slots from `first` to the one before `end`.
  at::Tensor slots_between(std::size_t first, std::size_t end) const;

  bool sparse() const {
    return sparse_;
  }
  const c10::Device& device() const {
    return device_;
  }
  // 0 for a sparse buffer, because its size differs between ranks.
  int64_t num_bytes() const {
    return sparse_ ? 0 : numel_ * static_cast<int64_t>(c10::elementSize(dtypes_.summed));
  }
  const GradDtypes& dtypes() const {
    return dtypes_;
  }

  // Whether a gradient of this dtype can be packed.
  bool takes(at::ScalarType dtype) const {
    return dtype == dtypes_.param || dtype == dtypes_.arriving || dtype == dtypes_.local ||
           dtype == c10::promoteTypes(dtypes_.arriving, dtypes_.local);  // two parts of a gradient
  }

  // Whether `param.grad` may lie in the buffer: the buffer has the dtype that the user gets.
  bool can_hold_grads() const {
    return !sparse_ && dtypes_.summed == dtypes_.averaged;
  }

  // Takes this step's sparse gradient as the buffer.
  void set_sparse(at::Tensor grad);

  // For a sparse buffer: the rows in which any rank may have a gradient, ascending. The all-reduce
  // then sums the values of these rows. Undefined if any row may have a gradient.
  void set_rows(at::Tensor rows) {
    rows_ = std::move(rows);
  }
  const at::Tensor& rows() const {
    return rows_;
  }

  // The gradient that was packed for `slot`.
  const at::Tensor& packed_slot(const Slot& slot) const {
    return sparse_ ? buffer_ : slot.view;
  }

  // Divides the packed buffer in place.
  void divide(int divisor);

  // ---- streams ----

  // The current device stream uses the buffer, or produced a gradient for it.
  void add_stream() {
    streams_.add(device_);
  }

  // The current stream of the device waits for the streams of add_stream().
  void wait_for_streams() {
    streams_.wait(device_);
  }

  // Whether these streams are the current one.
  bool on_current_stream() const {
    return streams_.only_current(device_);
  }

  // A backward has ended without an error: see StreamSet::restart().
  void forget_streams() {
    streams_.restart(device_);
  }

 protected:
  // A buffer like this one with zeros in every slot, without streams.
  GradBuffer zeros(const std::vector<at::Tensor>& params) const;

  // Drops the memory of a dense buffer. Gradients that lie in the buffer keep its memory.
  void drop_memory();

  // The part of `values`, a tensor with the elements of a dense buffer, in the layout of the slot.
  static at::Tensor part_of(const at::Tensor& values, const Slot& slot);

  const at::Tensor& buffer() const {
    return buffer_;
  }
  StreamSet& streams() {
    return streams_;
  }
  const StreamSet& streams() const {
    return streams_;
  }

 private:
  GradBuffer() = default;

  void allocate(Collective& collective, const std::vector<at::Tensor>& params, bool captured);

  c10::Device device_{c10::kCPU};
  bool sparse_ = false;
  GradDtypes dtypes_{at::kFloat, at::kFloat, at::kFloat, at::kFloat, at::kFloat};
  int64_t numel_ = 0;  // of a dense buffer
  at::Tensor buffer_;
  std::optional<c10::Stream> allocated_on_;  // by ensure_memory(); nullopt on CPU
  std::vector<Slot> slots_;
  bool has_small_slots_ = false;
  at::Tensor rows_;
  StreamSet streams_;
};

}  // namespace ddpx
