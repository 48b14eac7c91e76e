#include "stream_join.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace ddpx {

void StreamJoin::note_pack(c10::Device device) {
  if (device.is_cpu()) {
    return;
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

bool StreamJoin::join(c10::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const auto launching = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  bool joined_another = false;
  for (const auto& stream : streams_) {
    if (stream != launching) {
      joined_another = true;
      c10::Event packed(device.type());
      packed.record(stream);
      packed.block(launching);
    }
  }
  streams_.clear();
  return joined_another;
}

}  // namespace ddpx
