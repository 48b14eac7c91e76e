#include "store_access.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../os/unique_fd.h"
#include "store_text.h"

namespace ddpx {
namespace {

// Stores without the extended interface, such as FileStore, get equivalent calls.
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
    return to_text(store_->compareSet(key, {}, to_bytes(text)));
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
  // TCPStore logs two warnings when a wait times out, and a wait cannot be cancelled. So the
  // timeout is the longest that poll() permits, and the caller sets the key to end the wait.
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

// Throws if no server accepts connections. torch itself would try for minutes to connect, and warn
// each time.
void check_server(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return;  // torch may find the host
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  bool all_refuse = true;
  for (const auto* address = found; address != nullptr; address = address->ai_next) {
    const os::UniqueFd fd(socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval limit{4, 0};  // the answers of a link with long queues may take seconds
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
    if (connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) {
      return;
    }
    all_refuse = all_refuse && errno == ECONNREFUSED;
  }
  if (all_refuse) {
    throw health::StoreEnded();
  }
  throw std::runtime_error("the store cannot be reached");
}

}  // namespace

health::StoreAccess access_to(const c10::intrusive_ptr<c10d::Store>& store) {
  auto inner = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
    inner = prefixed->getUnderlyingNonPrefixStore();
  }
  std::function<void()> check = [] {};
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner.get())) {
    check = [host = tcp->getHost(), port = tcp->getPort()] { check_server(host, port); };
  }
  return [weak = c10::weak_intrusive_ptr<c10d::Store>(store),
          check]() -> std::unique_ptr<health::Store> {
    const auto held = weak.lock();
    if (!held) {
      return nullptr;
    }
    check();
    return std::make_unique<Connection>(held->clone());
  };
}

}  // namespace ddpx
