#include "stream_set.h"

#include <algorithm>

#include "device_stream.h"

namespace ddpx {
namespace {

void insert(std::vector<c10::Stream>& streams, c10::Stream stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

}  // namespace

void StreamSet::add(c10::Device device) {
  if (const auto stream = current_stream(device)) {
    insert(awaited_, *stream);
    insert(all_, *stream);
  }
}

void StreamSet::wait(c10::Device device) {
  if (awaited_.empty()) {
    return;
  }
  const auto waiting = *current_stream(device);
  for (const auto& stream : awaited_) {
    wait_for_stream(waiting, stream);
  }
  awaited_.clear();
}

void StreamSet::restart(c10::Device device) {
  awaited_.clear();
  all_.clear();
  if (const auto stream = current_stream(device)) {
    all_.push_back(*stream);
  }
}

bool StreamSet::only_current(c10::Device device) const {
  const auto current = current_stream(device);
  return std::all_of(
      awaited_.begin(), awaited_.end(), [&](const auto& stream) { return stream == current; });
}

void StreamSet::keep_alive(const at::Tensor& tensor) const {
  for (const auto& stream : all_) {
    keep_for_stream(tensor, stream);
  }
}

}  // namespace ddpx
