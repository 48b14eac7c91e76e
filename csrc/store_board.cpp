#include "store_board.h"

#include <string>
#include <vector>

namespace ddpx {
namespace {

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

class StoreBoard final : public health::Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& text) override {
    store_->set(key, to_bytes(text));
  }

  std::optional<std::string> get(const std::string& key) override {
    if (!store_->check({key})) {
      return std::nullopt;
    }
    const auto value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

  std::string set_first(const std::string& key, const std::string& text) override {
    const auto standing = store_->compareSet(key, std::vector<uint8_t>(), to_bytes(text));
    return {standing.begin(), standing.end()};
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::unique_ptr<health::Board> make_board(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_unique<StoreBoard>(store->clone());
}

}  // namespace ddpx
