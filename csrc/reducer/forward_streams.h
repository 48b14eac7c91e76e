// The streams of the caller on the devices of one module.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <utility>
#include <vector>

#include "../buckets/device_stream.h"

namespace ddpx {

// A thread of autograd knows the caller's stream of its own device only. On other devices it packs
// gradients that no backward has produced in this step: work of the caller may have written them.
// Does nothing for a module on one device. StepRunner owns the object, under the mutex of the
// reducer.
class ForwardStreams {
 public:
  explicit ForwardStreams(std::vector<c10::Device> devices) {
    if (devices.size() > 1) {
      devices_ = std::move(devices);
    }
  }

  // To be called in a forward, on the thread of the caller.
  void remember() {
    streams_.clear();
    for (const auto device : devices_) {
      if (const auto stream = current_stream(device)) {
        streams_.push_back(*stream);
      }
    }
  }

  // The current stream of each device waits for the stream of the last forward.
  void wait() const {
    for (const auto stream : streams_) {
      wait_for_stream(*current_stream(stream.device()), stream);
    }
  }

 private:
  std::vector<c10::Device> devices_;  // empty for one device
  std::vector<c10::Stream> streams_;
};

}  // namespace ddpx
