// The flat buffer of one bucket, with a slot per gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../comm/collective.h"
#include "../comm/comm_hook.h"
#include "bucket_plan.h"
#include "low_precision.h"
#include "stream_join.h"

namespace ddpx {

struct Slot {
  std::size_t param_index;
  int64_t offset;   // in the buffer, in elements
  at::Tensor view;  // of the bucket's buffer, with the sizes and, if dense, strides of the param
  mutable at::Tensor lent;  // the same memory, as param.grad; what becomes of it is the user's
  at::Tensor held;          // the gradient that arrived, until the whole bucket is packed
};

//   buffer  | slot 0 | slot 1 |   ...   | slot n-1 |      one dtype, one device, no padding
//
// The buffer has the dtype in which gradients are summed, which is the params' own unless asked.
// A sparse bucket has one slot without a view; its buffer is the step's sparse gradient itself.
// Owned by the reducer, guarded by its mutex; slot views may outlive it as gradients.
class Bucket {
 public:
  // What was launched: an all-reduce, or what a hook returned.
  struct Flight {
    Collective::Work work;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    CommHook* hook = nullptr;
  };

  Bucket(
      const BucketSpec& spec,
      const std::vector<at::Tensor>& params,
      bool sparse,
      Collective& collective,
      const Precision& precision = {});

  const std::vector<Slot>& slots() const {
    return slots_;
  }
  bool sparse() const {
    return sparse_;
  }
  const c10::Device& device() const {
    return device_;
  }
  int64_t num_bytes() const {  // of a sparse bucket's, those that all ranks agree on: none
    return sparse_ ? 0 : static_cast<int64_t>(buffer_.nbytes());
  }
  const GradDtypes& dtypes() const {
    return dtypes_;
  }

  // Whether gradients may be in this dtype when they are packed.
  bool takes(at::ScalarType dtype) const {
    return dtype == dtypes_.param || dtype == dtypes_.arriving || dtype == dtypes_.local;
  }

  // Whether gradients may lie in the buffer: it has the dtype that the user gets.
  bool can_lend() const {
    return !sparse_ && dtypes_.summed == dtypes_.averaged;
  }

  // Starts a step: every gradient is outstanding, and perhaps a gate that is not one of them.
  void begin_step(bool gated);

  // One gradient was just packed or held, on the current device stream, or the gate opened; true if
  // nothing is outstanding any more. Throws InternalError if nothing was.
  bool fill_one();

  // Keeps the gradient that arrived for a slot until all are packed together, since a hook of
  // another param may replace or clear `param.grad` before that.
  void hold(std::size_t slot_index, at::Tensor grad) {
    slots_[slot_index].held = std::move(grad);
  }

  // Moves the held gradients out, in slot order; undefined where a slot has none.
  std::vector<at::Tensor> take_held();

  // A gradient has arrived, or the bucket was used, on the current device stream.
  void note_stream() {
    streams_.note(device_);
  }

  // Takes this step's sparse gradient as the buffer.
  void set_sparse(at::Tensor grad);

  // Of a sparse bucket: the rows that any rank may have a gradient for, ascending; the all-reduce
  // is then one of these rows' values. Undefined: any row.
  void set_rows(at::Tensor rows) {
    rows_ = std::move(rows);
  }
  const at::Tensor& rows() const {
    return rows_;
  }

  // The current stream of the device waits for everything that was packed or held on others.
  void join_streams();

  // Divides the packed buffer in place.
  void divide(int divisor);

  // Starts the all-reduce of the buffer.
  void launch(Collective& collective);

  // Hands the buffer to a user's hook instead. `index` of `count` buckets, with these params.
  void launch(
      CommHook& hook, std::size_t index, std::size_t count, const std::vector<at::Tensor>& params);

  // From launch(), if that did not fail, to wait().
  bool in_flight() const {
    return flight_.has_value();
  }
  const Flight& flight() const {
    return *flight_;
  }

  // Waits for the all-reduce, or the hook: on CPU until it is done, on a device by making the
  // current stream wait. Rethrows what the backend or the hook throws.
  void wait(Collective& collective);

  // After wait(): the buffer with the sum over ranks of what was packed, or what the hook made.
  const at::Tensor& reduced() const {
    return reduced_;
  }

  // Drops it: a hook's result, or a sum in another dtype, is memory of its own.
  void release_reduced() {
    reduced_.reset();
  }

  // To be called before the bucket is dropped: its memory may be reused once the streams that have
  // used the bucket have come by.
  void keep_for_streams() const;

  // What was packed for `slot`.
  const at::Tensor& packed_slot(const Slot& slot) const {
    return sparse_ ? buffer_ : slot.view;
  }

  // The part of reduced() that belongs to `slot`, in the slot's layout.
  at::Tensor reduced_slot(const Slot& slot) const;

  // A bucket like this one with zeros in every slot; for a second pass, or on behalf of nobody.
  Bucket zeros_like(const std::vector<at::Tensor>& params) const;

 private:
  Bucket() = default;

  // What a hook brought, as elements of the buffer. UserError if it does not fit.
  at::Tensor as_reduced(const at::Tensor& result) const;

  c10::Device device_{c10::kCPU};
  bool sparse_ = false;
  GradDtypes dtypes_{at::kFloat, at::kFloat, at::kFloat, at::kFloat, at::kFloat};
  at::Tensor buffer_;
  at::Tensor rows_;
  at::Tensor row_values_;  // what is in flight if there are rows
  std::vector<Slot> slots_;
  std::vector<std::vector<int64_t>> real_sizes_;  // of complex params; a hook's bucket refers to it
  std::size_t num_outstanding_ = 0;
  StreamJoin streams_;
  std::optional<Flight> flight_;
  at::Tensor reduced_;
};

}  // namespace ddpx
