#include "store_board.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <string>
#include <utility>

#include "../health/listening.h"
#include "store_text.h"

namespace ddpx {
namespace {

class StoreBoard final : public health::Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : original_(std::move(store)) {}

  void set(const std::string& key, const std::string& text) override {
    store().set(key, to_bytes(text));
  }

  std::optional<std::string> get(const std::string& key) override {
    return get_text(store(), key);
  }

  std::string set_first(const std::string& key, const std::string& text) override {
    return set_first_text(store(), key, text);
  }

  std::function<bool()> server_ended() const override {
    auto store = original_;
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      store = prefixed->getUnderlyingNonPrefixStore();
    }
    const auto* tcp = dynamic_cast<const c10d::TCPStore*>(store.get());
    if (tcp == nullptr) {
      return [] { return false; };
    }
    return [host = tcp->getHost(), port = tcp->getPort()] {
      return health::refuses_connections(host, port, std::chrono::milliseconds(1000));
    };
  }

 private:
  // Connects at the first call, on the thread that may wait: if the store's process is gone or
  // stopped, that takes until the store's timeout.
  c10d::Store& store() {
    if (!clone_) {
      clone_ = original_->clone();
      original_.reset();
    }
    return *clone_;
  }

  c10::intrusive_ptr<c10d::Store> original_;
  c10::intrusive_ptr<c10d::Store> clone_;
};

}  // namespace

std::unique_ptr<health::Board> make_board(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_unique<StoreBoard>(store);
}

}  // namespace ddpx
