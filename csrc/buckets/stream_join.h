// Makes a launch wait for packs that were issued on other device streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace ddpx {

// A collective waits for the stream that it is launched from. Autograd runs a gradient hook on the
// stream that was current when the param's accumulator was made, which is when the module was
// wrapped, unless a graph with this param was alive then. So the gradients of one bucket can be
// packed on several streams; this object remembers them.
// Device-generic, through c10's guards. On CPU every call does nothing. Not thread-safe.
class StreamJoin {
 public:
  // A gradient has arrived, or was packed, on the current stream of `device`.
  void note(c10::Device device);

  // Makes the current stream of `device` wait for all noted streams, and forgets them.
  void join(c10::Device device);

  // The memory of `tensor` stays as it is until all streams that were ever noted have come by, also
  // if the tensor is dropped.
  void keep(const at::Tensor& tensor) const;

 private:
  std::vector<c10::Stream> streams_;
  std::vector<c10::Stream> all_;
};

}  // namespace ddpx
