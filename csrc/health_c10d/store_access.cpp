#include "store_access.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../health/listening.h"
#include "store_text.h"

namespace ddpx {
namespace {

// The answers of a link with long queues may take seconds.
constexpr auto kTimeToConnect = std::chrono::milliseconds(4000);

std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

// The calls that only some stores have, such as TCPStore, are replaced for other stores: FileStore.
class Connection final : public health::Store {
 public:
  explicit Connection(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::vector<std::string>& keys, const std::string& text) override {
    if (keys.size() > 1 && store_->hasExtendedApi()) {
      store_->multiSet(keys, std::vector<std::vector<uint8_t>>(keys.size(), to_bytes(text)));
      return;
    }
    for (const auto& key : keys) {
      store_->set(key, to_bytes(text));
    }
  }
  std::optional<std::string> get(const std::string& key) override {
    return get_text(*store_, key);
  }
  std::string set_first(const std::string& key, const std::string& text) override {
    return set_first_text(*store_, key, text);
  }
  void append(const std::string& key, const std::string& text) override {
    append_text(*store_, key, text);
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store_->add(key, value);
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) override {
    std::vector<std::string> texts;
    if (store_->hasExtendedApi()) {
      for (const auto& bytes : store_->multiGet(keys)) {
        texts.push_back(to_text(bytes));
      }
    } else {
      for (const auto& key : keys) {
        texts.push_back(to_text(store_->get(key)));
      }
    }
    return texts;
  }
  // TCPStore logs two warnings when a wait times out, and a wait cannot be cancelled. So it takes
  // the longest time that poll() can wait for, and the caller sets the key to end it.
  void await(const std::string& key) override {
    if (store_->hasExtendedApi()) {
      store_->wait({key}, std::chrono::hours(24 * 20));
    } else {
      while (!store_->check({key})) {  // FileStore would look for the key 100 times a second
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
      }
    }
    store_->deleteKey(key);
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

health::StoreAccess access_to(const c10::intrusive_ptr<c10d::Store>& store) {
  health::StoreAccess access;
  auto inner = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
    inner = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner.get());
  access.ask = [](uint16_t) { return health::PortState::kUnknown; };
  std::function<health::PortState()> ask_patiently = [] { return health::PortState::kUnknown; };
  if (tcp != nullptr) {
    access.ask = [host = tcp->getHost()](uint16_t port) {
      return health::state_of_port(host, port, std::chrono::milliseconds(1000));
    };
    ask_patiently = [host = tcp->getHost(), port = tcp->getPort()] {
      return health::state_of_port(host, port, kTimeToConnect);
    };
    access.port = tcp->getPort();
    access.own_port = health::listen_if_local(tcp->getHost());
  }
  access.connect = [weak = c10::weak_intrusive_ptr<c10d::Store>(store), ask_patiently] {
    const auto held = weak.lock();
    if (!held) {
      throw std::runtime_error("the process group was destroyed");
    }
    // torch would try to connect again for minutes.
    if (health::is_lost(ask_patiently())) {
      throw std::runtime_error("the store cannot be reached");
    }
    return std::make_unique<Connection>(held->clone());
  };
  return access;
}

}  // namespace ddpx
