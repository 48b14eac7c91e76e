// The flat buffer of one bucket, with a slot per gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../comm/collective.h"
#include "../comm/comm_hook.h"
#include "../comm/in_flight_reduction.h"
#include "bucket_plan.h"
#include "low_precision.h"
#include "stream_set.h"

namespace ddpx {

struct Slot {
  std::size_t param_index;
  int64_t offset;   // in the buffer, in elements
  at::Tensor view;  // of the bucket's buffer, with the sizes and, if dense, strides of the param
  mutable at::Tensor grad_alias;  // alias of `view` for `param.grad`; user code may change it
  bool small = false;  // packed with the other small gradients of the bucket, by pack_all()
};

//   buffer  | slot 0 | slot 1 |   ...   | slot n-1 |      one dtype, one device, no padding
//
// A lazy bucket has memory from the first ensure_memory() of a step to free_memory(). Between steps
// it has neither a buffer nor views.
//
// The buffer has the dtype in which gradients are summed: the dtype of the params, unless the user
// asked for another one. A sparse bucket has one slot without a view; its buffer is the sparse
// gradient of the step itself.
//
// The reducer owns the bucket, under its mutex. Slot views may outlive the bucket as gradients.
class Bucket {
 public:
  Bucket(
      const BucketSpec& spec,
      const std::vector<at::Tensor>& params,
      bool sparse,
      Collective& collective,
      const Precision& precision = {},
      bool lazy = false);

  // Whether the slots have memory, which a lazy bucket lacks between steps.
  bool has_memory() const {
    return sparse_ || buffer_.defined();
  }

  // Allocates the buffer of a lazy bucket, and returns true if there was none. The current stream
  // may write to the buffer afterwards. `captured`: a graph is captured, which torch 2.11 cannot
  // tell.
  bool ensure_memory(
      Collective& collective, const std::vector<at::Tensor>& params, bool captured = false);

  // Drops the buffer of a dense bucket. Gradients that lie in the buffer keep its memory.
  void free_memory();

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
  // 0 for a sparse bucket, because its size differs between ranks.
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

  // The current device stream uses the bucket, or produced a gradient for it.
  void add_stream() {
    streams_.add(device_);
  }

  // Takes this step's sparse gradient as the buffer.
  void set_sparse(at::Tensor grad);

  // For a sparse bucket: the rows in which any rank may have a gradient, ascending. The all-reduce
  // then sums the values of these rows. Undefined if any row may have a gradient.
  void set_rows(at::Tensor rows) {
    rows_ = std::move(rows);
  }
  const at::Tensor& rows() const {
    return rows_;
  }

  // The current stream of the device waits for the streams of add_stream().
  void wait_for_streams();

  // Whether these streams are the current one.
  bool on_current_stream() const {
    return streams_.only_current(device_);
  }

  // A captured step has failed. Captured work never runs, so the memory stays in use.
  void drop_captured() {
    in_flight_.reset();
    row_values_.reset();
    reduced_.reset();
    streams_.forget();
  }

  // Makes the current stream wait for everything that was packed. To be called before launch().
  void prepare_launch();

  // A backward has ended without an error: see StreamSet::restart().
  void forget_streams() {
    streams_.restart(device_);
  }

  // Divides the packed buffer in place.
  void divide(int divisor);

  // Starts the all-reduce of the buffer.
  void launch(Collective& collective);

  // Passes the buffer to a communication hook instead of an all-reduce. `index` of `count` buckets,
  // with these params.
  void launch(
      CommHook& hook, std::size_t index, std::size_t count, const std::vector<at::Tensor>& params);

  // True from a launch() that did not fail to wait().
  bool in_flight() const {
    return in_flight_.has_value();
  }
  const InFlightReduction& reduction() const {
    return *in_flight_;
  }

  // Waits for the all-reduce, or the hook: on CPU until it is done, on a device by making the
  // current stream wait. Rethrows what the backend or the hook throws.
  void wait(Collective& collective);

  // After wait(): the buffer with the sum over ranks of what was packed, or what the hook made.
  const at::Tensor& reduced() const {
    return reduced_;
  }

  // After wait(): divides the result by a float64 tensor with one element. Rounds once, also in 16
  // bits. The result of a hook outside the buffer stays as it is, and the bucket takes a new
  // tensor.
  void divide_reduced(const at::Tensor& divisor);

  // Drops the result of wait(): that of a hook, or a sum in another dtype, has memory of its own.
  void release_reduced() {
    reduced_.reset();
  }

  // To be called before the bucket is dropped. Keeps the memory from reuse until all streams that
  // used the bucket have passed this point, and until the hook of a reduction in flight has ended.
  void keep_for_streams() const;

  // The gradient that was packed for `slot`.
  const at::Tensor& packed_slot(const Slot& slot) const {
    return sparse_ ? buffer_ : slot.view;
  }

  // The part of reduced() that belongs to `slot`, in the slot's layout.
  at::Tensor reduced_slot(const Slot& slot) const;

  // A bucket like this one with zeros in every slot, for a rank without gradients.
  Bucket zeros_like(const std::vector<at::Tensor>& params) const;

 private:
  Bucket() = default;

  void allocate(Collective& collective, const std::vector<at::Tensor>& params, bool captured);

  // The result of `source`, as elements of the buffer. UserError if it does not fit.
  at::Tensor as_reduced(const at::Tensor& result, const std::string& source) const;

  c10::Device device_{c10::kCPU};
  bool sparse_ = false;
  GradDtypes dtypes_{at::kFloat, at::kFloat, at::kFloat, at::kFloat, at::kFloat};
  int64_t numel_ = 0;  // of a dense buffer
  at::Tensor buffer_;
  std::optional<c10::Stream> allocated_on_;  // by ensure_memory(); nullopt on CPU
  at::Tensor rows_;
  at::Tensor row_values_;  // in flight, if there are rows
  std::vector<Slot> slots_;
  bool has_small_slots_ = false;
  std::vector<std::vector<int64_t>> real_sizes_;  // of complex params; a hook's bucket refers to it
  StreamSet streams_;
  std::optional<InFlightReduction> in_flight_;
  at::Tensor reduced_;
};

}  // namespace ddpx
