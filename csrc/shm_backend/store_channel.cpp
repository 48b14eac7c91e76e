#include "store_channel.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace ddpx {

StoreChannel::StoreChannel(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

void StoreChannel::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

std::string StoreChannel::get(const std::string& key, std::chrono::milliseconds timeout) {
  store_->wait({key}, timeout);
  const auto value = store_->get(key);
  return {value.begin(), value.end()};
}

}  // namespace ddpx
