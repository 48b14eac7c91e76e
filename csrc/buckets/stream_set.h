// The device streams that use one bucket.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace ddpx {

// A collective waits for the stream that it is launched from. Autograd runs a gradient hook on the
// stream that was current when the param's accumulator was made: when the module was wrapped, or
// earlier, if a graph with this param was alive then. So the gradients of one bucket can be packed
// on several streams. This set remembers these streams.
//
// A bucket owns the set, under the mutex of the reducer. The set works with any device type through
// c10's guards. On CPU every call does nothing.
class StreamSet {
 public:
  // The current stream of `device` uses the bucket.
  void add(c10::Device device);

  // Makes the current stream of `device` wait for all added streams, and forgets these streams.
  void wait(c10::Device device);

  // Whether no added stream is another one than the current stream of `device`.
  bool only_current(c10::Device device) const;

  // No later work needs to wait for the added streams. During the capture of a graph, no stream can
  // wait for a stream of an earlier step.
  void forget() {
    awaited_.clear();
  }

  // For the end of a backward: autograd then makes the stream of the caller, which is current, wait
  // for the streams of all gradients, and the caller orders its own streams between steps, as with
  // DDP. So only this stream remains.
  void restart(c10::Device device);

  // Keeps the memory of `tensor` unchanged until all streams that were added have passed this
  // point, also if the tensor is dropped.
  void keep_alive(const at::Tensor& tensor) const;

 private:
  std::vector<c10::Stream> awaited_;
  std::vector<c10::Stream> all_;
};

}  // namespace ddpx
