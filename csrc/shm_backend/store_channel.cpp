#include "store_channel.h"

#include <utility>

#include "../health_c10d/store_text.h"

namespace ddpx {

StoreChannel::StoreChannel(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

void StoreChannel::set(const std::string& key, const std::string& value) {
  store_->set(key, to_bytes(value));
}

void StoreChannel::append(const std::string& key, const std::string& value) {
  append_text(*store_, key, value);
}

int64_t StoreChannel::count_up(const std::string& key) {
  return store_->add(key, 1);
}

std::string StoreChannel::get(const std::string& key, std::chrono::milliseconds timeout) {
  store_->wait({key}, timeout);
  const auto value = store_->get(key);
  return {value.begin(), value.end()};
}

}  // namespace ddpx
