#include "stream_join.h"

#include <algorithm>

#include "device_stream.h"

namespace ddpx {
namespace {

void add(std::vector<c10::Stream>& streams, c10::Stream stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

}  // namespace

void StreamJoin::note(c10::Device device) {
  if (const auto stream = current_stream(device)) {
    add(streams_, *stream);
    add(all_, *stream);
  }
}

void StreamJoin::keep(const at::Tensor& tensor) const {
  for (const auto& stream : all_) {
    tensor.record_stream(stream);
  }
}

void StreamJoin::join(c10::Device device) {
  if (streams_.empty()) {
    return;
  }
  const auto joining = *current_stream(device);
  for (const auto& stream : streams_) {
    wait_for_stream(joining, stream);
  }
  streams_.clear();
}

}  // namespace ddpx
