#include "stream_join.h"

#include <algorithm>

#include "device_stream.h"

namespace ddpx {

void StreamJoin::note(c10::Device device) {
  const auto stream = current_stream(device);
  if (stream && std::find(streams_.begin(), streams_.end(), *stream) == streams_.end()) {
    streams_.push_back(*stream);
  }
}

bool StreamJoin::join(c10::Device device) {
  if (streams_.empty()) {
    return false;
  }
  const auto joining = *current_stream(device);
  bool joined_another = false;
  for (const auto& stream : streams_) {
    joined_another = joined_another || stream != joining;
    wait_for_stream(joining, stream);
  }
  streams_.clear();
  return joined_another;
}

}  // namespace ddpx
