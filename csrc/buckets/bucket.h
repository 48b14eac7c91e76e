// One bucket: the memory of its gradients, and their reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../comm/comm_hook.h"
#include "../comm/in_flight_reduction.h"
#include "grad_buffer.h"

namespace ddpx {

// The memory of a bucket, with its reduction over ranks: launch(), wait(), then reduced(). The
// reducer owns the bucket, under its mutex.
class Bucket : public GradBuffer {
 public:
  using GradBuffer::GradBuffer;

  // Makes the current stream wait for everything that was packed. To be called before launch().
  void prepare_launch();

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

  // The part of reduced() that belongs to `slot`, in the slot's layout.
  at::Tensor reduced_slot(const Slot& slot) const;

  // After wait(): divides the result by a float64 tensor with one element. Rounds once, also in 16
  // bits. The result of a hook outside the buffer stays as it is, and the bucket takes a new
  // tensor.
  void divide_reduced(const at::Tensor& divisor);

  // Drops the result of wait(): that of a hook, or a sum in another dtype, has memory of its own.
  void release_reduced() {
    reduced_.reset();
  }

  // A captured step has failed. Captured work never runs, so the memory stays in use.
  void drop_captured() {
    in_flight_.reset();
    row_values_.reset();
    reduced_.reset();
    streams().forget();
  }

  // Drops the memory of a dense bucket. Gradients that lie in the buffer keep its memory.
  void free_memory();

  // To be called before the bucket is dropped. Keeps the memory from reuse until all streams that
  // used the bucket have passed this point, and until the hook of a reduction in flight has ended.
  void keep_for_streams() const;

  // A bucket like this one with zeros in every slot, for a rank without gradients.
  Bucket zeros_like(const std::vector<at::Tensor>& params) const;

 private:
  explicit Bucket(GradBuffer memory) : GradBuffer(std::move(memory)) {}

  // The result of `source`, as elements of the buffer. UserError if it does not fit.
  at::Tensor as_reduced(const at::Tensor& result, const std::string& source) const;

  at::Tensor row_values_;                         // in flight, if there are rows
  std::vector<std::vector<int64_t>> real_sizes_;  // of complex params; a hook's bucket refers to it
  std::optional<InFlightReduction> in_flight_;
  at::Tensor reduced_;
};

}  // namespace ddpx
